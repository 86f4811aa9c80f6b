"""MXNet's C library, where its Python offers no function."""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import check_call
from mxnet.ndarray.register import _make_ndarray_function

from ..common.mxnet_version import IS_GLUON_2

_LIB = mx.base._LIB
# Absent from builds of MXNet without oneDNN, which have no other layouts. It has no C
# interface, only this C++ name.
_reorder = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)


def path() -> str:
    """The libmxnet.so that is loaded; `mx.libinfo` searches, and may find another."""
    return _LIB._name


def push(
    function: Any,  # of a library that ctypes has loaded
    address: int,
    context: mx.Context,
    read: Sequence,
    written: Sequence = (),
) -> None:
    """Lets MXNet's engine call a C function with `address` once `read` are ready.

    What is queued later waits for it before it uses `written`, which hold no array
    twice. Python's `mx.engine` only sets the size of bulks.
    """
    place = (ctypes.c_int * 2)(context.device_typeid, context.device_id)
    lists = []
    for arrays in read, written:
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
        lists += [handles, len(arrays)]
    code = _LIB.MXEnginePushSyncND(
        *(function, ctypes.c_void_p(address), None, place),
        *(*lists, None, 0, b"gluon_syncbn"),
    )
    mx.base.check_call(code)


def memory_of(array: mx.nd.NDArray) -> np.ndarray:
    """NumPy's view of a CPU array's own memory; the work on it must have ended."""
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(pointer.value)
    return np.frombuffer(memory, dtype)


def make_plain(x: mx.nd.NDArray) -> None:
    """Converts oneDNN's blocked layout to row-major, in place; else a no-op.

    It happens before what is queued next; every public operator makes a copy.
    """
    if _reorder is not None and x.context.device_type != "gpu":
        _reorder(x.handle)


# ---- Operators without the casts that ``contrib.amp`` puts around ``mx.nd``, and
# around copies to another context: with them parts of an output, and gradients, would
# not keep their dtype. `amp` replaces the public functions, so these are made as MXNet
# makes its own.


def _operator(name):
    handle = ctypes.c_void_p()
    mx.base.check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return _make_ndarray_function(handle, name, name)


add_n = _operator("add_n")
broadcast_add = _operator("broadcast_add")
concat = _operator("Concat")
identity = _operator("_copy")
_copyto = _operator("_copyto")


def array_of(values: np.ndarray, context: mx.Context) -> mx.nd.NDArray:
    """An array of the kind that blocks take, with the values and dtype of NumPy's."""
    if IS_GLUON_2:
        return mx.np.array(values, values.dtype, context)
    return mx.nd.array(values, context, values.dtype)


def to_context(array: mx.nd.NDArray, context: mx.Context) -> mx.nd.NDArray:
    """The array on a context; unchanged if already on that context."""
    if array.context == context:
        return array
    copy = mx.nd.empty(array.shape, context, array.dtype)
    copy = _copyto(array.as_nd_ndarray(), out=copy)
    return copy.as_np_ndarray() if isinstance(array, mx.np.ndarray) else copy
