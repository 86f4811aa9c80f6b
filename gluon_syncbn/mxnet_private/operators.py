"""MXNet's operators without the casts that ``contrib.amp`` puts around ``mx.nd``.

Called by ``parallel``. With these casts, which copies to another context have too,
parts of one output and gradients would not keep their dtype. `amp` replaces the public
functions, so these are made of MXNet's registry, as MXNet makes its own.
"""

from __future__ import annotations

import ctypes

import mxnet as mx
from mxnet.ndarray.register import _make_ndarray_function


def _operator(name):
    handle = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return _make_ndarray_function(handle, name, name)


broadcast_add = _operator("broadcast_add")
concat = _operator("Concat")
_copyto = _operator("_copyto")


def to_context(array: mx.nd.NDArray, context: mx.Context) -> mx.nd.NDArray:
    """The array on a context; unchanged if already on that context."""
    if array.context == context:
        return array
    copy = mx.nd.empty(array.shape, context, array.dtype)
    copy = _copyto(array.as_nd_ndarray(), out=copy)
    return copy.as_np_ndarray() if isinstance(array, mx.np.ndarray) else copy
