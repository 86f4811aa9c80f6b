"""A function of the native library that MXNet's engine runs among its own operations.

Called by ``monitor.py``.
"""

from __future__ import annotations

import ctypes

import mxnet as mx

from ..mxnet_private.library import push
from .library import load


def note_time(address: int, context: mx.Context, read: list) -> None:
    """Lets MXNet write the time to `address` once the arrays `read` are ready.

    The address is of a double, which gets seconds of the monotonic clock.
    """
    function = ctypes.cast(load().gluon_syncbn_note_time, ctypes.c_void_p)
    push(function, address, context, read)
