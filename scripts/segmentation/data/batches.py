"""The batches of an epoch: its images in their order, as arrays for the net.

Order and augmentation depend on (seed, epoch, image) and nothing else, so a resumed run
sees what the first one would have seen.
"""

from concurrent.futures import ThreadPoolExecutor

from gluon_syncbn import distributed

import numpy as np

from .augment import normalized, train_view, val_view


class Batches:
    """Batches (x, y) of a data set: x float32 (n, 3, crop, crop), y float32."""

    def __init__(self, dataset, config, training):
        self._dataset, self._config, self._training = dataset, config, training
        self.count = -(-len(dataset) // config.batch_size)  # over all processes

    def _indices(self, epoch):
        order = np.arange(len(self._dataset))
        if self._training:
            np.random.default_rng([self._config.seed, epoch]).shuffle(order)
        size = self._config.batch_size  # the last batch takes what is left
        batches = [order[k : k + size] for k in range(0, len(order), size)]
        # Of several processes each takes its rows; a last batch may have none for some.
        shards = [np.array_split(b, distributed.size()) for b in batches]
        return [s[distributed.rank()] for s in shards if len(s[distributed.rank()])]

    def view(self, epoch, index):
        """The crop of one image, uint8, and of its label map."""
        image, label = self._dataset.load(index)
        crop = self._config.crop_size
        if not self._training:
            return val_view(image, label, crop)
        rng = np.random.default_rng([self._config.seed, epoch, index])
        return train_view(image, label, crop, self._dataset.may_flip, rng)

    def assemble(self, views):
        """The arrays (x, y) of some views."""
        images, labels = zip(*views)
        x = np.stack([normalized(image) for image in images])
        return x, np.stack(labels).astype(np.float32)

    def epoch(self, epoch):
        """Yield the batches of one epoch, counted from 0."""

        def load(indices):
            return self.assemble([self.view(epoch, int(k)) for k in indices])

        with ThreadPoolExecutor(1) as pool:
            ready = None
            for indices in self._indices(epoch):
                loading = pool.submit(load, indices)  # while the one before trains
                if ready:
                    yield ready.result()
                ready = loading
            if ready:
                yield ready.result()
