"""Finds the variables that an array was computed from, in `autograd`'s graphs.

Called by ``batch.py``, ``backward.py`` and ``bridge.py``. MXNet numbers the
variables of a process, so their names tell them apart.
"""

from __future__ import annotations

import ctypes
from typing import Any, Iterable

import mxnet as mx


def is_recorded(array: Any) -> bool:
    """Tells whether `array` is a result that `autograd` records, or has a gradient."""
    return isinstance(array, mx.nd.NDArray) and _symbol(array.handle) is not None


def name_of(handle: Any) -> str | None:
    """The name of a variable, given by its handle; None if nothing is recorded."""
    symbol = _symbol(handle)
    return None if symbol is None else symbol.name


def names_behind(handles: Iterable) -> set[str]:
    """The names of all variables that some arrays, given by handles, depend on."""
    symbols = [symbol for symbol in map(_symbol, handles) if symbol is not None]
    return set(mx.sym.Group(symbols).list_arguments()) if symbols else set()


def _symbol(handle):
    symbol = ctypes.c_void_p()
    if mx.base._LIB.MXAutogradGetSymbol(handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)
