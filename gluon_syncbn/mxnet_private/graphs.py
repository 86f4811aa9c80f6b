"""Autograd's graphs: the variables in them, and the function that differentiates them.

Called by ``devices`` and ``parallel``.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import _ndarray_cls

_LIB = mx.base._LIB
DTYPES = {  # by NumPy's type the name; MXNet publishes no list of its dtypes
    kind: np.dtype(kind).name
    for kind in mx.nd.ndarray._DTYPE_NP_TO_MX
    if isinstance(kind, type)
}


# ---- Variables. MXNet numbers those of a process, so names tell them apart. The public
# autograd.get_symbol raises where nothing is recorded.


def is_recorded(array: Any) -> bool:
    """Tells whether `array` is a result that `autograd` records, or has a gradient."""
    return isinstance(array, mx.nd.NDArray) and _symbol(array) is not None


def name_of(variable: mx.nd.NDArray) -> str | None:
    """The name of a variable; None if nothing is recorded."""
    symbol = _symbol(variable)
    return None if symbol is None else symbol.name


def names_behind(arrays: Iterable) -> set[str]:
    """The names of all variables that some arrays depend on."""
    symbols = [symbol for symbol in map(_symbol, arrays) if symbol is not None]
    return set(mx.sym.Group(symbols).list_arguments()) if symbols else set()


def _symbol(array):
    symbol = ctypes.c_void_p()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)


# ---- Blocks of `autograd.record()`. Autograd tells whether one is open, not which.


class _Blocks(threading.local):
    """A thread's count, and the scopes that are open.

    Ctrl-C may raise in the first line of `__enter__` or `__exit__`, so that a scope is
    never left. Then nothing else holds it, and it is no longer open.
    """

    def __init__(self):
        self.number, self.open = 0, weakref.WeakSet()


_blocks = _Blocks()


def block_number() -> int:
    """How many outermost blocks this thread has entered."""
    return _blocks.number


def _count_blocks():
    scope = autograd._RecordingStateScope
    enter, leave = scope.__enter__, scope.__exit__

    def __enter__(self):
        _blocks.number += not _blocks.open
        _blocks.open.add(self)
        return enter(self)

    def __exit__(self, *exception):
        _blocks.open.discard(self)
        return leave(self, *exception)

    scope.__enter__, scope.__exit__ = __enter__, __exit__


_count_blocks()


# ---- Backward. MXNet has no hook in it: `backward` and `autograd.grad` both call one
# function of the library, which `replace_backward` replaces.

_mxnet_differentiate = _LIB.MXAutogradBackwardEx


def _differentiate(*arguments):
    """As MXNet's, but for the text about an operator that no user has called."""
    code = _mxnet_differentiate(*arguments)
    if code != 0 and b"_backward_Custom is non-diff" in _LIB.MXGetLastError():
        raise ValueError(
            "these gradients were made with create_graph=True, but those of a "
            "SyncBatchNorm, or another custom operator, cannot be differentiated "
            "again; expected create_graph=False"
        )
    mx.base.check_call(code)


class Request:
    """A call of MXNet's backward, or of `autograd.grad`.

    A gradient that is None stands for ones.
    """

    def __init__(self, arguments: tuple) -> None:
        self._arguments = arguments
        values = [getattr(argument, "value", argument) for argument in arguments[:8]]
        count, heads, gradients, num_variables, _, retain_graph, _, train_mode = values
        self.heads = [_array_of(heads[k]) for k in range(count)]
        self.gradients = list(map(_array_of, gradients or [None] * count))
        self.is_grad = num_variables > 0
        self.retain_graph, self.train_mode = bool(retain_graph), bool(train_mode)

    def run(self) -> None:
        """Does what MXNet would do."""
        _differentiate(*self._arguments)


def replace_backward(backward: Callable[[Request], None]) -> None:
    """Calls `backward` in place of MXNet's function; once in a process."""

    def replacement(*arguments):
        backward(Request(arguments))
        return 0

    _LIB.MXAutogradBackwardEx = replacement


def differentiate(
    heads: Sequence,
    gradients: Sequence,
    variables: Sequence,
    retain_graph: bool,
    train_mode: bool,
) -> list[mx.nd.NDArray]:
    """As `autograd.backward`, or `autograd.grad` if there are variables.

    A gradient that is None stands for ones. Calls MXNet's own function, not the one
    that replaces it.
    """
    grads = ctypes.POINTER(ctypes.c_void_p)()
    stypes = ctypes.POINTER(ctypes.c_int)()
    of_heads = (ctypes.c_void_p * len(heads))(
        *(None if gradient is None else gradient.handle for gradient in gradients)
    )
    flags = map(ctypes.c_int, (retain_graph, False, train_mode))
    _differentiate(
        *(len(heads), mx.base.c_handle_array(heads), of_heads),
        *(len(variables), mx.base.c_handle_array(variables), *flags),
        *(ctypes.byref(grads), ctypes.byref(stypes)),
    )
    return [
        _ndarray_cls(ctypes.c_void_p(grads[k]), stype=stypes[k])
        for k in range(len(variables))
    ]


def _array_of(handle):
    """A new NDArray for the array that a handle stands for; None for no handle."""
    if handle is None:
        return None
    copy = ctypes.c_void_p()
    code = _LIB.MXShallowCopyNDArray(ctypes.c_void_p(handle), ctypes.byref(copy))
    mx.base.check_call(code)
    return mx.nd.NDArray(copy)
