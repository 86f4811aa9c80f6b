"""Functions of MXNet's C library that its Python interface lacks."""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import check_call
from mxnet.ndarray.register import _make_ndarray_function

from ..common.mxnet_version import IS_GLUON_2

_LIB = mx.base._LIB
# The function has no C interface, only this C++ name. Builds of MXNet without oneDNN
# lack it, because they have no blocked layouts.
_reorder = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)


def path() -> str:
    """Return the path of the loaded libmxnet.so; `mx.libinfo` may find another file."""
    return _LIB._name


def push(
    function: Any,  # a C function of a library that ctypes has loaded
    address: int,
    context: mx.Context,
    read: Sequence,
    written: Sequence = (),
) -> None:
    """Let MXNet's engine call a C function with `address` once `read` are ready.

    Work that is queued later waits for this call before it uses the arrays `written`,
    which must not contain an array twice. Python's `mx.engine` only sets bulk sizes.
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
    """Return a NumPy view of a CPU array's memory; wait for pending work before."""
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(pointer.value)
    return np.frombuffer(memory, dtype)


def make_plain(x: mx.nd.NDArray) -> None:
    """Convert oneDNN's blocked layout to row-major in place, before later work.

    Arrays with another layout are unchanged. Every public operator would make a copy.
    """
    if _reorder is not None and x.context.device_type != "gpu":
        _reorder(x.handle)


# ---- Operators without the casts of ``contrib.amp``, which replaces the public
# functions of ``mx.nd``. Its casts would change the dtype of outputs and gradients.
# These operators are made in the way in which MXNet makes its own.


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
    """Return an array of the type that blocks take, with NumPy's values and dtype."""
    if IS_GLUON_2:
        return mx.np.array(values, values.dtype, context)
    return mx.nd.array(values, context, values.dtype)


def sum_into_first(lists: Sequence[Sequence]) -> None:
    """Add the dense arrays of each list, on several contexts, to its first one."""
    for first, *others in lists:
        total, copies = first.as_nd_ndarray(), []
        for array in others:
            copy = mx.nd.empty(array.shape, first.context, array.dtype)
            copies.append(_copyto(array.as_nd_ndarray(), out=copy))
        if copies:
            add_n(total, *copies, out=total)


def to_context(array: mx.nd.NDArray, context: mx.Context) -> mx.nd.NDArray:
    """Return a copy on another context, or the array itself if it is there."""
    if array.context == context:
        return array
    copy = mx.nd.empty(array.shape, context, array.dtype)
    copy = _copyto(array.as_nd_ndarray(), out=copy)
    return copy.as_np_ndarray() if isinstance(array, mx.np.ndarray) else copy
