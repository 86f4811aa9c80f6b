"""MXNet's operators without the casts that ``contrib.amp`` puts around ``mx.nd``.

Called by ``parallel``. With these casts, which copies to another context have too,
parts of one output and gradients would not keep their dtype. `amp` replaces the public
functions, so these are made of MXNet's registry, as MXNet makes its own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray.register import _make_ndarray_function


def _operator(name):
    handle = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return _make_ndarray_function(handle, name, name)


broadcast_add = _operator("broadcast_add")
concat = _operator("Concat")
reshape = _operator("Reshape")
slice_axis = _operator("slice_axis")
_amp_cast = _operator("amp_cast")
_cast = _operator("Cast")
_copyto = _operator("_copyto")


def cast(array: mx.nd.NDArray, dtype: Any) -> mx.nd.NDArray:
    """The array in a dtype; unchanged if it has that dtype."""
    if array.dtype == dtype:
        return array
    is_bfloat16 = np.dtype(dtype).names is not None  # which only one operator knows
    return (_amp_cast if is_bfloat16 else _cast)(array, dtype=dtype)


def to_context(array: mx.nd.NDArray, context: mx.Context) -> mx.nd.NDArray:
    """The array on a context; unchanged if already on that context."""
    if array.context == context:
        return array
    if isinstance(array, mx.np.ndarray):
        return copy(array.as_nd_ndarray(), context).as_np_ndarray()
    return copy(array, context)


def copy(array: mx.nd.NDArray, context: mx.Context) -> mx.nd.NDArray:
    """A copy of the array, on a context."""
    return _copyto(array, out=mx.nd.empty(array.shape, context, array.dtype))
