"""Collectives over MPI: sums, comparisons and copies of values of all processes.

Ranks first meet in an exchange like the layers' exchanges, so a rank that is missing,
or that calls another function, is an error that names the rank. Then mpi4py sends JSON
and arrays, so no received data runs code.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np

from ..mxnet_private.arrays import memory_of
from ..native import failures
from ..native.library import load
from ..native.processes import wait_seconds, world

_AWAKE, _PAUSE = 0.1, 5e-4  # seconds
_abandoned: list = []  # memory that MPI may still write to after a failure
_IN_PLACE = np.dtype("float32"), np.dtype("float64")


def total(
    name: str,
    numbers: Sequence[float] = (),
    signature: str = "",
    timeout: float | None = None,
) -> list[float]:
    """Return the sums over all processes, with equal bits on all ranks.

    Calls of one name match by their order on each rank. Raise
    :class:`mxnet.MXNetError`, which names the ranks, if a rank does not arrive within
    the timeout or signatures differ.
    """
    sums = np.array(numbers, np.float64)
    sent = sums.ctypes.data, sums.size, wait_seconds(timeout)
    if world().size > 1:
        failures.check(load().gluon_syncbn_distributed_sum(name, signature, *sent))
    return sums.tolist()


def allgather(value: Any, name: str, timeout: float | None = None) -> list:
    """Return the values of all processes in the order of ranks, sent as JSON."""
    if world().size == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    own = [0] * world().size
    own[world().rank] = text.size
    sizes = [int(size) for size in total(name, own, timeout=timeout)]
    texts = np.empty(sum(sizes), np.uint8)
    with collectives(name, timeout) as requests:
        requests.append(world().comm.Iallgatherv(text, [texts, sizes]))
    parts = np.split(texts, np.cumsum(sizes)[:-1])
    return [json.loads(part.tobytes()) for part in parts]


def broadcast(
    arrays: Sequence[np.ndarray], root: int, name: str, timeout: float | None = None
) -> None:
    """Copy the arrays of the process `root` into the arrays of all others."""
    if world().size == 1:
        return
    size = sum(array.nbytes for array in arrays)
    total(name, signature=f"root={root}, {size} bytes", timeout=timeout)
    with collectives(name, timeout) as requests:
        for array in arrays:  # as bytes, because MPI has no float16
            data = array.reshape(-1).view(np.uint8)
            requests.append(world().comm.Ibcast(data, root))


def sum_in_place(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Sum gradients over all ranks, as soon as each array is ready.

    Raise :class:`mxnet.MXNetError` on all ranks if an array has an error on one rank,
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


@contextmanager
def collectives(
    name: str, timeout: float | None = None, memory: Any = None
) -> Iterator[list]:
    """Wait for the requests of MPI that the block appends to the list.

    Raise MXNetError if another rank has failed, or if the requests are not done within
    the timeout. After an error `memory` is kept alive, and all ranks fail.
    """
    from mpi4py import MPI

    seconds, requests = wait_seconds(timeout), []  # type: ignore[var-annotated]
    try:
        yield requests
        begin = time.monotonic()
        while not MPI.Request.Testall(requests):  # a test also makes MPI go on
            waited = time.monotonic() - begin
            if waited < _AWAKE:
                os.sched_yield()
                continue
            failure = failures.failure()
            if not failure and waited > seconds:
                failure = (
                    f"{name}: values did not arrive within {seconds:g} s: a rank that "
                    "had begun this call has died, or was stopped"
                )
            if failure:
                raise mx.MXNetError(failure)
            time.sleep(_PAUSE)  # a rank that is late may need this processor
    except BaseException as error:
        _abandoned.append((memory, requests))
        failures.end_waits(str(error) or repr(error))  # others wait for this rank
        raise
