"""Autograd's graphs: the nodes in them, and the functions that differentiate them."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import weakref
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import _ndarray_cls

from .library import identity as _identity

_LIB = mx.base._LIB
DTYPES = {  # by NumPy's type the name; MXNet publishes no list of its dtypes
    dtype: np.dtype(dtype).name
    for dtype in mx.nd.ndarray._DTYPE_NP_TO_MX
    if isinstance(dtype, type)
}


# ---- Nodes. MXNet numbers those of a process, so their names are unique. A variable
# with a gradient is "var7", an array that an operator has read without one is "null7",
# and an operator is "node_7". The public autograd.get_symbol raises where nothing is
# recorded.


def is_recorded(array: Any) -> bool:
    """Return True if `array` is the result of a recorded operator, or a variable."""
    return _symbol(array) is not None


def name_of(array: Any) -> str | None:
    """Return the name of the node that an array is; None if nothing is recorded."""
    symbol = _symbol(array)
    return None if symbol is None else symbol.name


def entry_of(array: Any) -> str | None:
    """Return the name of a result among all results; None if nothing is recorded."""
    symbol = _symbol(array)
    return None if symbol is None else symbol.list_outputs()[0]


def names_behind(arrays: Iterable) -> set[str]:
    """Return the names of all variables that some arrays depend on."""
    symbols = symbols_of(arrays)
    return set(mx.sym.Group(symbols).list_arguments()) if symbols else set()


def variables_behind(arrays: Iterable) -> set[str]:
    """Return the names of the variables with a gradient that arrays depend on."""
    return {name for name in names_behind(arrays) if name.startswith("var")}


def operators_behind(arrays: Iterable) -> list[int]:
    """Return the numbers of all recorded operators that some arrays depend on."""
    symbols = symbols_of(arrays)
    if not symbols:
        return []
    names = mx.sym.Group(symbols).get_internals().list_outputs()
    return [int(found.group(1)) for found in map(_OPERATOR.match, names) if found]


def next_operator() -> int:
    """Return the number of an operator that is recorded by this call."""
    return operators_behind([_identity(_marked("null", mx.cpu()))])[0]


@functools.lru_cache(maxsize=None)
def _marked(grad_req, context):
    """Return an array that makes operators recorded; no graph keeps it."""
    array = mx.nd.zeros((1,), ctx=context)
    array.attach_grad(grad_req)
    return array


_OPERATOR = re.compile(r"node_(\d+)")


def symbols_of(arrays: Iterable) -> list[mx.sym.Symbol]:
    """Return the recorded graphs of those arrays that have one."""
    return [symbol for symbol in map(_symbol, arrays) if symbol is not None]


def _symbol(array):
    symbol = ctypes.c_void_p()
    if not isinstance(array, mx.nd.NDArray):
        return None
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)


# ---- Blocks of `autograd.record()`. Autograd tells whether one is open, not which.

_scope = autograd._RecordingStateScope
_MXNET_ENTER, _MXNET_EXIT = _scope.__enter__, _scope.__exit__
_counting = 0  # owners


class _Blocks(threading.local):
    """A thread's count, and the scopes that are open.

    Ctrl-C may raise in the first line of `__enter__` or `__exit__`, so that a scope is
    never left. Then nothing else holds it, and it is no longer open.
    """

    def __init__(self):
        self.number, self.open = 0, weakref.WeakSet()


_blocks = _Blocks()


def count_blocks_for(owner: Any) -> None:
    """Lets threads count the blocks that they enter, as long as `owner` lives."""
    global _counting
    _counting += 1
    _scope.__enter__, _scope.__exit__ = _enter, _exit
    weakref.finalize(owner, _end_counting).atexit = False


def block_number() -> int:
    """How many outermost blocks this thread has entered since blocks are counted."""
    return _blocks.number


def _end_counting():
    global _counting
    _counting -= 1
    if not _counting:
        _scope.__enter__, _scope.__exit__ = _MXNET_ENTER, _MXNET_EXIT


def _enter(self):
    _blocks.number += not _blocks.open
    _blocks.open.add(self)
    return _MXNET_ENTER(self)


def _exit(self, *exception):
    _blocks.open.discard(self)
    return _MXNET_EXIT(self, *exception)


# ---- Backward. MXNet has no hook in it: `backward` and `autograd.grad` both call one
# function of the library, which `replace_backward` replaces.

_mxnet_differentiate = _LIB.MXAutogradBackwardEx


class BackwardCall:
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
        mx.base.check_call(_mxnet_differentiate(*self._arguments))


def replace_backward(
    backward: Callable[[BackwardCall], None], concerns: Callable[[], Any]
) -> None:
    """Calls `backward` in place of MXNet's function, while it concerns any graph."""

    def replacement(*arguments):
        if not concerns():
            return _mxnet_differentiate(*arguments)
        backward(BackwardCall(arguments))
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
    code = _mxnet_differentiate(
        *(len(heads), mx.base.c_handle_array(heads), of_heads),
        *(len(variables), mx.base.c_handle_array(variables), *flags),
        *(ctypes.byref(grads), ctypes.byref(stypes)),
    )
    mx.base.check_call(code)
    return [
        _ndarray_cls(ctypes.c_void_p(grads[k]), stype=stypes[k])
        for k in range(len(variables))
    ]


def drop(heads: Sequence) -> None:
    """Drop the graphs behind some heads, as a backward does that retains none.

    Arrays without a gradient are then in no graph any more: otherwise MXNet would go on
    recording what reads them. One more head whose gradient alone is computed makes it
    a backward that runs no operator of the graphs.
    """
    variable = _marked("write", heads[0].context)
    with autograd.record():
        heads = [*heads, _identity(variable)]
    differentiate(heads, heads, [variable], False, True)


def _array_of(handle):
    """A new NDArray for the array that a handle stands for; None for no handle."""
    if handle is None:
        return None
    copy = ctypes.c_void_p()
    code = _LIB.MXShallowCopyNDArray(ctypes.c_void_p(handle), ctypes.byref(copy))
    mx.base.check_call(code)
    return mx.nd.NDArray(copy)
