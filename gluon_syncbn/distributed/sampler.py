"""A sampler that shares the batches of an epoch among the processes."""

from __future__ import annotations

import numpy as np
from mxnet.gluon.data import Sampler

from ..arguments import check_bool, check_int
from ..native.world import world


class ShardSampler(Sampler):
    """A sampler of this process's rows, for the DataLoader's `batch_sampler`.

    All processes get equally many batches of the same order. If the last batch has
    fewer rows than there are processes, it repeats rows from the beginning.

    Parameters
    ----------
    length : int
        Number of samples of the data set.
    batch_size : int
        Rows of a batch, summed over *all* processes; at least one row for each.
    shuffle : bool, default True
        If true, every epoch has a new order; otherwise the data set's order is kept.
    seed : int, default 0
        Seed of the order, which depends only on it and on the epoch's number.

    Examples
    --------
    >>> from gluon_syncbn.distributed import ShardSampler
    >>> list(ShardSampler(7, 4, shuffle=False))
    [[0, 1, 2, 3], [4, 5, 6]]
    """

    def __init__(
        self, length: int, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._rank, self._size = world().rank, world().size
        self._length = check_int("length", length, minimum=1)
        self._batch_size = check_int("batch_size", batch_size, minimum=self._size)
        self._shuffle = check_bool("shuffle", shuffle)
        self._seed, self.epoch = check_int("seed", seed, minimum=0), 0
        self._rows = length + max(0, self._size - (length % batch_size or self._size))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; each epoch increments it."""
        self.epoch = check_int("epoch", epoch, minimum=0)

    def __iter__(self):
        order = np.arange(self._length)
        if self._shuffle:
            np.random.default_rng([self._seed, self.epoch]).shuffle(order)
        self.epoch += 1
        order = np.resize(order, self._rows)  # wraps around
        for start in range(0, self._rows, self._batch_size):
            batch = order[start : start + self._batch_size]
            yield batch[self._rank :: self._size].tolist()

    def __len__(self):
        return -(-self._rows // self._batch_size)
