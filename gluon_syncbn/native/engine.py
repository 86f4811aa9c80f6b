"""A function of the native library that MXNet's engine runs among its own operations.

Called by ``monitor.py``.
"""

from __future__ import annotations

import ctypes

import mxnet as mx

from .library import load


def note_time(address: int, context: mx.Context, read: list) -> None:
    """Lets MXNet write the time to `address` once the arrays `read` are ready.

    The address is of a double, which gets seconds of the monotonic clock.
    """
    function = ctypes.cast(load().gluon_syncbn_note_time, ctypes.c_void_p)
    place = (ctypes.c_int * 2)(context.device_typeid, context.device_id)
    handles = (ctypes.c_void_p * len(read))(*(array.handle for array in read))
    code = mx.base._LIB.MXEnginePushSyncND(
        *(function, ctypes.c_void_p(address), None, place),
        *(handles, len(read), None, 0, None, 0, b"gluon_syncbn"),
    )
    mx.base.check_call(code)
