"""The processes compare and copy values outside of training steps.

The processes first meet in an exchange like those of the layers, so that a rank that
is missing, or that does something else, is an error and named. Then mpi4py carries JSON
and arrays, which run no code where they arrive.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np

from ..native import failures
from ..native.library import load
from ..native.world import wait_seconds, world

_AWAKE, _PAUSE = 0.1, 5e-4  # seconds
_abandoned: list = []  # MPI may still write into what belongs to requests that failed


def total(
    name: str,
    numbers: Sequence[float] = (),
    signature: str = "",
    timeout: float | None = None,
) -> list[float]:
    """The sums over all processes; equal bits in all.

    Calls of one name match by their order on each rank, whatever else runs. Raises
    :class:`mxnet.MXNetError` if not all come within the timeout, or their signatures
    differ; the text names the ranks.
    """
    sums = np.array(numbers, np.float64)
    sent = sums.ctypes.data, sums.size, wait_seconds(timeout)
    if world().size > 1:
        failures.check(load().gluon_syncbn_distributed_sum(name, signature, *sent))
    return sums.tolist()


def allgather(value: Any, name: str, timeout: float | None = None) -> list:
    """The values of all processes, in the order of ranks; JSON has to hold them."""
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
    """Copies the arrays of the process `root` into those of all others."""
    if world().size == 1:
        return
    size = sum(array.nbytes for array in arrays)
    total(name, signature=f"root={root}, {size} bytes", timeout=timeout)
    with collectives(name, timeout) as requests:
        for array in arrays:  # as bytes, because MPI has no float16
            data = array.reshape(-1).view(np.uint8)
            requests.append(world().comm.Ibcast(data, root))


@contextmanager
def collectives(
    name: str, timeout: float | None = None, memory: Any = None
) -> Iterator[list]:
    """Waits for the requests of MPI that the block appends to the list.

    After an error `memory` stays alive, and all ranks fail. Raises MXNetError if
    another rank has failed, or the requests are not done within the timeout.
    """
    from mpi4py import MPI

    seconds, requests = wait_seconds(timeout), []  # type: ignore[var-annotated]
    try:
        yield requests
        begin = time.monotonic()
        while not MPI.Request.Testall(requests):  # which also carries them on
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
