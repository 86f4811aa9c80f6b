"""The batches of an epoch: which images, in which order, as arrays for the net.

Order and augmentation depend on (seed, epoch, image) and nothing else, so a resumed run
sees what the first one would have seen, with any number of loading threads.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import UserError
from .augment import normalized, train_view, val_view


def split_epoch(order, batch_size, least):
    """Cut `order` into batches of `batch_size`; the last takes what is left.

    Every index comes once, and no batch has fewer than `least` rows: a last batch
    that is too small borrows from the one before, or joins it if that cannot lend.
    """
    if len(order) < least:
        raise UserError(
            f"The data set has {len(order)} images, but each of the {least} devices "
            "needs at least one in a batch."
        )
    starts = list(range(0, len(order), batch_size)) + [len(order)]
    if len(starts) > 2 and starts[-1] - starts[-2] < least:
        starts[-2] = starts[-1] - least
        if starts[-2] - starts[-3] < least:
            del starts[-2]
    return [order[a:b] for a, b in zip(starts, starts[1:])]


class Batches:
    """Batches (x, y) of a data set: x float32 (n, 3, crop, crop), y float32."""

    def __init__(self, dataset, config, training):
        self._dataset, self._config, self._training = dataset, config, training
        self._least = config.num_devices if training else 1
        self.count = len(self._indices(0))

    def _indices(self, epoch):
        order = np.arange(len(self._dataset))
        if self._training:
            np.random.default_rng([self._config.seed, epoch]).shuffle(order)
        return split_epoch(order, self._config.batch_size, self._least)

    def view(self, epoch, index):
        """The crop of one image, uint8, and of its label map."""
        image, label = self._dataset.load(index)
        config = self._config
        if not self._training:
            return val_view(image, label, config.crop_size)
        rng = np.random.default_rng([config.seed, epoch, index])
        scales = (config.min_scale, config.max_scale)
        may_flip = self._dataset.may_flip
        return train_view(image, label, config.crop_size, scales, may_flip, rng)

    def assemble(self, views):
        """The arrays (x, y) of some views."""
        images, labels = zip(*views)
        x = np.stack([normalized(image) for image in images])
        return x, np.stack(labels).astype(np.float32)

    def epoch(self, epoch):
        """Yield the batches of one epoch, counted from 0."""
        groups = self._indices(epoch)
        if not self._config.workers:
            for group in groups:
                yield self.assemble(self.view(epoch, int(k)) for k in group)
            return
        with ThreadPoolExecutor(self._config.workers) as pool:
            submit = lambda group: [  # noqa: E731
                pool.submit(self.view, epoch, int(k)) for k in group
            ]
            waiting = submit(groups[0])
            for later in [*groups[1:], None]:
                ready, waiting = waiting, later is not None and submit(later)
                yield self.assemble(future.result() for future in ready)
