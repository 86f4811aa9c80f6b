"""Functions of MXNet's C library, and operators without casts."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import check_call
from mxnet.ndarray._internal import _imperative_invoke
from mxnet.ndarray.register import _make_ndarray_function

from ..compat import IS_GLUON_2

_LIB = mx.base._LIB
DTYPES = {  # names of MXNet's dtypes by NumPy type; MXNet publishes no list
    dtype: np.dtype(dtype).name
    for dtype in mx.nd.ndarray._DTYPE_NP_TO_MX
    if isinstance(dtype, type)
}
# Reorder2DefaultAsync has no C interface, only this C++ name. Builds of MXNet without
# oneDNN lack it, because they have no blocked layouts.
_reorder = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)


# ---- MXNet's C library.


def mxnet_path() -> str:
    """Return the path of the loaded libmxnet.so; `mx.libinfo` may find another file."""
    return _LIB._name


def push(
    function: Any,  # a C function of a library that ctypes has loaded
    address: int,  # the function's argument
    context: mx.Context,
    read: Sequence,
    written: Sequence = (),
) -> None:
    """Make MXNet's engine call a C function once the arrays `read` are ready.

    Work that is queued later waits for this call before it uses the arrays `written`,
    which must not contain an array twice. MXNet's Python API cannot queue C functions.
    """
    place = (ctypes.c_int * 2)(context.device_typeid, context.device_id)
    lists = []
    for arrays in read, written:
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
        lists += [handles, len(arrays)]
    call = function, ctypes.c_void_p(address), None, place
    check_call(_LIB.MXEnginePushSyncND(*call, *lists, None, 0, b"gluon_syncbn"))


def memory_of(array: mx.nd.NDArray) -> np.ndarray:
    """Return a NumPy view of a CPU array's memory once no queued work uses the array.

    MXNet's Python API waits for writers only (`wait_to_read`). Whoever writes through
    the view must also wait for readers.
    """
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(pointer.value)
    return np.frombuffer(memory, dtype)


def make_plain(x: mx.nd.NDArray) -> None:
    """Queue a conversion from oneDNN's blocked layout to row-major, in place.

    Every public operator would make a copy.
    """
    if _reorder is not None and x.context.device_type != "gpu":
        _reorder(x.handle)


@lru_cache(maxsize=None)
def _operator_handle(name):
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return handle


def invoke(name: str, operands: Sequence, **attributes: str) -> mx.nd.NDArray:
    """Call an operator that has no Python function, or without the casts of AMP."""
    keys, values = list(attributes), list(attributes.values())
    handle = _operator_handle(name).value
    return _imperative_invoke(handle, operands, keys, values, None, False, False)


# ---- Operators without casts. ``contrib.amp`` adds casts to the public functions of
# ``mx.nd``, which would change the dtype of outputs and gradients.


def _operator(name):
    return _make_ndarray_function(_operator_handle(name), name, name)


broadcast_add = _operator("broadcast_add")
concat = _operator("Concat")
identity = _operator("_copy")
slice_axis = _operator("slice_axis")
_add_n = _operator("add_n")
copyto = _operator("_copyto")


def array_of(values: np.ndarray, context: mx.Context) -> mx.nd.NDArray:
    """Return an array of the type that blocks accept, with NumPy's values and dtype."""
    if IS_GLUON_2:
        return mx.np.array(values, values.dtype, context)
    return mx.nd.array(values, context, values.dtype)


def to_context(array: mx.nd.NDArray, context: mx.Context) -> mx.nd.NDArray:
    """Return a copy on a context, or the array itself if it is already there."""
    if array.context == context:
        return array
    copied = mx.nd.empty(array.shape, context, array.dtype)
    copied = copyto(array.as_nd_ndarray(), out=copied)
    return copied.as_np_ndarray() if isinstance(array, mx.np.ndarray) else copied


def write_sum(arrays: Sequence, out: mx.nd.NDArray, adds: bool = False) -> None:
    """Write the sum of arrays on any contexts into `out`, or add the sum to it."""
    context = out.context
    if out.stype != "default":
        arrays = [array.as_in_context(context) for array in arrays]
        mx.nd.add_n(*arrays, *([out] if adds else [])).copyto(out)
        return
    out, arrays = out.as_nd_ndarray(), [array.as_nd_ndarray() for array in arrays]
    if context.device_type == "gpu":  # CPU contexts read each other's arrays
        arrays = [to_context(array, context) for array in arrays]
    if adds and arrays[0] is not out:
        arrays.insert(0, out)
    if len(arrays) > 1:
        _add_n(*arrays, out=out)
    elif arrays[0] is not out:
        copyto(*arrays, out=out)
