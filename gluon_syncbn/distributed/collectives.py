"""Sums and copies of arrays over all processes, for metrics, gradients and parameters.

Called by users, ``parameters.py`` and ``trainer.py``. Calls of one name match by their
order on each rank, whatever other exchanges run. It must not know what is exchanged.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any

import mxnet as mx
import numpy as np

from ..common.arguments import check_int, check_text
from ..native import failures
from ..native.library import load
from ..native.world import wait_seconds, world

# Reduce operations by dtype; asking a dtype for its name takes longer than an exchange.
_SUMS = {np.dtype(name): f"sum_{name}" for name in ("float32", "float64", "int64")}
_HIGHEST = np.uint64(2**63 - 1)


def allreduce(
    array: Any, name: str = "allreduce", timeout: float | None = None
) -> np.ndarray:
    """The sum of an array over all processes.

    Added up in a fixed order of ranks, so every process gets the same bits, in every
    run. A process that has joined (:func:`join`) counts as zero.

    Parameters
    ----------
    array : numpy.ndarray, mxnet.nd.NDArray or number
        Of the same shape and dtype in all processes. float16 is added up in float32,
        integers and booleans in int64, which has to hold the sum.
    name : str, default "allreduce"
        Begins the messages of errors. Calls of different names never match.
    timeout : float or None, default None
        Seconds to wait for the other processes; None means
        :func:`gluon_syncbn.get_timeout`.

    Returns
    -------
    numpy.ndarray
        Of the shape of `array`.

    Raises
    ------
    TypeError
        If `array` holds no numbers.
    ValueError
        If `array` holds an integer beyond int64.
    mxnet.MXNetError
        If not all processes call it within the timeout, or shapes or dtypes differ. The
        text names the ranks.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.allreduce([1.5, 2.0])  # one process
    array([1.5, 2. ])
    """
    _check(name, timeout)
    if isinstance(array, mx.nd.NDArray):
        array = array.asnumpy()
    array = np.asarray(array)
    if array.dtype.kind in "bui":
        if array.dtype.kind == "u" and (array > _HIGHEST).any():
            raise ValueError(f"array fits int64, but holds {array.max()}")
        array = array.astype(np.int64)
    elif array.dtype == np.float16:
        array = array.astype(np.float32)
    operation = _SUMS.get(array.dtype)
    if operation is None:
        raise TypeError(f"array holds numbers, but got the dtype {array.dtype}")
    if world().size == 1:
        return array.copy()
    signature = f"{operation}, shape={array.shape}"
    total = exchange(name, operation, array, signature, timeout)
    return total.view(array.dtype).reshape(array.shape)


def allgather(
    value: Any, name: str = "allgather", timeout: float | None = None
) -> list:
    """The values of all processes as a list, in the order of ranks.

    Parameters
    ----------
    value : object
        Anything that can be pickled. A process that has joined contributes none.
    name, timeout
        As in :func:`allreduce`.

    Raises
    ------
    mxnet.MXNetError
        If not all processes call it within the timeout. The text names the ranks.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.allgather("one process")
    ['one process']
    """
    _check(name, timeout)
    if world().size == 1:
        return [value]
    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    stream = io.BytesIO(exchange(name, "concat", mine, "pickled", timeout).tobytes())
    values, end = [], stream.getbuffer().nbytes
    while stream.tell() < end:
        values.append(pickle.load(stream))
    return values


def broadcast(
    value: Any, root: int = 0, name: str = "broadcast", timeout: float | None = None
) -> Any:
    """The value of the process `root`, in all processes.

    Parameters
    ----------
    value : object
        Anything that can be pickled; the values of other processes than `root` do not
        matter.
    root : int, default 0
        A rank; the same in all processes.
    name, timeout
        As in :func:`allreduce`.

    Raises
    ------
    ValueError
        If `root` is no rank.
    mxnet.MXNetError
        If not all processes call it within the timeout. The text names the ranks.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.broadcast({"seed": 3})  # one process
    {'seed': 3}
    """
    check_root(root)
    _check(name, timeout)
    if world().size == 1:
        return value
    pickled = pickle.dumps(value) if world().rank == root else b""
    mine = np.frombuffer(pickled, np.uint8)
    everything = exchange(name, "concat", mine, f"root={root}", timeout)
    return value if world().rank == root else pickle.loads(everything.tobytes())


def check_root(root: int) -> None:
    """Raises TypeError or ValueError unless `root` is a rank."""
    if not 0 <= check_int("root", root) < world().size:
        raise ValueError(f"root is a rank below {world().size}, but got {root}")


def _check(name, timeout):
    check_text("name", name)
    wait_seconds(timeout)


def barrier(timeout: float | None = None) -> None:
    """Waits until all processes have called it. Training needs none.

    Parameters
    ----------
    timeout : float or None, default None
        As in :func:`allreduce`.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.barrier()  # one process
    """
    allreduce(0, "barrier", timeout)


def exchange(
    name: str,
    operation: str,
    array: np.ndarray,
    signature: str,
    timeout: float | None = None,
) -> np.ndarray:
    """One native exchange of an array's bytes; returns the reduced bytes as uint8."""
    library, seconds = load(), wait_seconds(timeout)
    array, size = np.ascontiguousarray(array), ctypes.c_int64()
    sent = array.ctypes.data, array.nbytes, seconds, ctypes.byref(size)
    failures.check(
        library.gluon_syncbn_distributed_exchange(name, signature, operation, *sent)
    )
    reduced = np.empty(size.value, np.uint8)
    library.gluon_syncbn_distributed_result(reduced.ctypes.data)
    return reduced
