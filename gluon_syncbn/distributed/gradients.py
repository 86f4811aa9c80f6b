"""Sums of gradients over processes with MPI, in the arrays' own memory."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np

from ..mxnet_private.arrays import memory_of
from ..native.world import world
from .meeting import collectives

_IN_PLACE = np.dtype("float32"), np.dtype("float64")


def sum_in_place(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Sum arrays over all ranks as soon as each array is ready.

    Raises :class:`mxnet.MXNetError` on all ranks if an array has an error on one rank,
    or if a rank does not arrive within the timeout.
    """
    from mpi4py import MPI

    sums = []
    with collectives("Trainer.step", memory=arrays) as requests:
        for array in arrays:
            array.wait_to_read()
            sums.append(_memory(array))
            requests.append(world().comm.Iallreduce(MPI.IN_PLACE, sums[-1]))
    for array, values in zip(arrays, sums):
        if not _is_in_place(array):
            array[:] = values


def _is_in_place(array):
    on_cpu = array.context.device_type != "gpu"
    return on_cpu and np.dtype(array.dtype) in _IN_PLACE


def _memory(array):
    """Return a view of an array's memory, or a copy if MPI cannot sum in it."""
    if _is_in_place(array):
        return memory_of(array)
    values = array.asnumpy()
    return values.astype("float32") if values.dtype == np.float16 else values
