"""The processes compare and copy values outside of training steps.

mpi4py carries them; before that the processes meet in an exchange like those of the
layers, so that a rank that is missing, or that does something else, is an error and
named.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ..native import failures
from ..native.library import load
from ..native.world import wait_seconds, world


def total(
    name: str,
    numbers: Sequence[float] = (),
    signature: str = "",
    timeout: float | None = None,
) -> list[float]:
    """The sums over all processes; equal bits in all.

    Calls of one name match by their order on each rank, whatever else runs. A process
    that has joined counts as zero. Raises :class:`mxnet.MXNetError` if not all come
    within the timeout, or their signatures differ; the text names the ranks.
    """
    sums = np.array(numbers, np.float64)
    sent = sums.ctypes.data, sums.size, wait_seconds(timeout)
    if world().size > 1:
        failures.check(load().gluon_syncbn_distributed_sum(name, signature, *sent))
    return sums.tolist()


def allgather(value: Any, name: str, timeout: float | None = None) -> list:
    """The values of all processes, in the order of ranks. They can be pickled."""
    if world().size == 1:
        return [value]
    total(name, timeout=timeout)
    return world().comm.allgather(value)


def broadcast(value: Any, root: int, name: str, timeout: float | None = None) -> Any:
    """The value of the process `root`. It can be pickled."""
    if world().size == 1:
        return value
    total(name, signature=f"root={root}", timeout=timeout)
    return world().comm.bcast(value, root)
