"""A sampler that shares the samples of an epoch among the processes.

It must not know the data.
"""

from __future__ import annotations

import numpy as np
from mxnet.gluon.data import Sampler

from ..common.arguments import check_bool, check_int
from ..common.shares import share_bounds
from ..native.world import world


class ShardSampler(Sampler):
    """Batches of indices for this process, for the argument `batch_sampler`.

    All processes draw the same order, cut it into the same batches, and take their own
    rows of every batch: no sample is taken twice in an epoch, and none is left out.
    Where the rows of a batch cannot be shared evenly, the first ranks take one more; a
    last batch of fewer rows than there are processes leaves some without one, so let
    every process end its epoch with :meth:`Trainer.join`.

    Parameters
    ----------
    length : int
        Number of samples of the data set.
    batch_size : int
        Rows of a batch over *all* processes, at least one for each.
    shuffle : bool, default True
        Whether every epoch has a new order; otherwise it has that of the data set.
    seed : int, default 0
        The order depends on the seed and the number of the epoch only.
    rank, size : int, optional
        This process and their number; :func:`rank` and :func:`size` by default.

    Raises
    ------
    ValueError
        If `length` or `seed` is negative, `length` beyond int64, `batch_size` less than
        the number of processes, or `rank` none below `size`.
    TypeError
        If one of them is no int.

    Examples
    --------
    >>> from gluon_syncbn.distributed import ShardSampler
    >>> for rank in range(2):
    ...     print(list(ShardSampler(7, 4, shuffle=False, rank=rank, size=2)))
    [[0, 1], [4, 5]]
    [[2, 3], [6]]
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self._rank = world().rank if rank is None else rank
        self._size = world().size if size is None else size
        check_int("size", self._size, minimum=1, maximum=2**31 - 1)
        check_int("rank", self._rank, minimum=0, maximum=self._size - 1)
        check_int("length", length, minimum=0, maximum=2**63 - 1)
        check_int("batch_size", batch_size)
        check_bool("shuffle", shuffle)
        check_int("seed", seed, minimum=0)
        if batch_size < self._size:
            raise ValueError(
                f"batch_size is at least one row for each of the {self._size} "
                f"processes, but got {batch_size}"
            )
        self._length, self._batch_size = length, batch_size
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, from 0; by default it advances
        after each pass."""
        self.epoch = check_int("epoch", epoch, minimum=0)

    def __iter__(self):
        order = range(self._length)
        if self._shuffle:
            order = np.arange(self._length)
            np.random.default_rng([self._seed, self.epoch]).shuffle(order)
        self.epoch += 1
        for start in range(0, self._length, self._batch_size):
            rows = min(self._batch_size, self._length - start)
            begin, end = share_bounds(rows, self._size)[self._rank]
            if begin < end:
                yield [int(index) for index in order[start + begin : start + end]]

    def __len__(self):
        batches, rows = divmod(self._length, self._batch_size)
        return int(batches + (self._rank < rows))  # the first ranks have the last rows
