"""The tape of autograd: its recorded graphs, its scopes, and its backward."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
from mxnet import autograd

from .arrays import identity as _identity

_LIB = mx.base._LIB


# ---- Nodes of autograd. Their names are unique in a process: "var7" is a variable (an
# array with attach_grad), "null7" another array that an operator has read, "node_7" an
# operator. The public autograd.get_symbol raises for an array that is not recorded.


def names_of(arrays: Iterable) -> list[str | None]:
    """Return the unique name of each array, or None if it is not recorded."""
    symbols = symbols_of(arrays)
    return [None if s is None else s.list_outputs()[0] for s in symbols]


def variables_behind(arrays: Iterable, symbols: Iterable | None = None) -> set[str]:
    """Return the names of all variables that arrays, or their graphs, depend on."""
    found = symbols_of(arrays) if symbols is None else symbols
    symbols = [symbol for symbol in found if symbol is not None]
    names = mx.sym.Group(symbols).list_arguments() if symbols else []
    return {name for name in names if name.startswith("var")}


@functools.lru_cache(maxsize=None)
def _unused_variable(context):
    """Return a variable that no net reads."""
    array = mx.nd.zeros((1,), ctx=context)
    array.attach_grad()  # a backward would detach it if grad_req were "null"
    return array


def symbols_of(arrays: Iterable) -> list[Any]:
    """Return each array's recorded graph, or None."""
    symbols = []
    for array in arrays:
        symbol = ctypes.c_void_p()
        is_recorded = isinstance(array, mx.nd.NDArray) and (
            _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)) == 0
        )
        symbols.append(mx.sym.Symbol(symbol) if is_recorded else None)
    return symbols


# ---- Objects that live as long as a graph. An autograd.Function is in a cycle, so it
# would keep them until Python's next garbage collection.

_owned: dict = {}  # {number: _Owned}
_numbers = itertools.count(1)
# Graphs may outlive this module, so MXNet's lists of callbacks must not be freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_owned))


class _Owned:
    """An object, and the callbacks of the operator whose deletion releases it.

    MXNet may delete the operator in any thread, also while the interpreter ends or
    another thread forks, and such a thread must not wait for Python's GIL. So the
    callback is native, and only sets a flag that `release_owners` reads.
    """

    def __init__(self, set_flag: Any) -> None:
        self.flag, self.owner = ctypes.c_int(0), None
        address = ctypes.cast(set_flag, ctypes.c_void_p).value
        self.functions = (ctypes.c_void_p * 2)(None, address)
        self.arguments = (ctypes.c_void_p * 2)(None, ctypes.addressof(self.flag))
        pointer = ctypes.POINTER(ctypes.CFUNCTYPE(ctypes.c_int))
        functions = ctypes.cast(self.functions, pointer)
        self.callbacks = mx.base.MXCallbackList(2, functions, self.arguments)


def owning_zero(owner: Any, array: mx.nd.NDArray, set_flag: Any) -> mx.nd.NDArray:
    """Return a recorded 0 to add to an array; its graph keeps `owner` alive.

    `set_flag` is a C function that sets the int at its argument to 1.
    """
    release_owners()
    shape = (1,) * array.ndim
    zeros = [mx.nd.zeros(shape, array.context, array.dtype) for _ in range(2)]
    zeros[0].attach_grad("null")  # the operator is recorded, but has no backward
    owned = _owned[next(_numbers)] = _Owned(set_flag)
    source, result = (mx.base.c_handle_array([zero]) for zero in zeros)
    reference = ctypes.byref(owned.callbacks)
    mx.base.check_call(_LIB.MXCustomFunctionRecord(1, source, 1, result, reference))
    owned.owner = owner  # not before, so that a failed call does not keep it
    return zeros[1]


def release_owners() -> None:
    """Release the owners of graphs that MXNet has deleted."""
    for number, owned in list(_owned.items()):
        if owned.flag.value:
            _owned.pop(number, None)


# ---- Scopes. The class of scopes such as ``with autograd.record():`` is private.

_scopes = threading.local()


@functools.lru_cache(maxsize=None)
def count_scopes() -> None:
    """Count the scopes that a thread enters while it neither records nor trains."""
    enter = autograd._RecordingStateScope.__enter__

    def counted_enter(self):
        if not (autograd.is_recording() or autograd.is_training()):
            _scopes.number = getattr(_scopes, "number", 0) + 1
        return enter(self)

    autograd._RecordingStateScope.__enter__ = counted_enter


def scope_number() -> int:
    """Return how many scopes `count_scopes` has counted in this thread."""
    return getattr(_scopes, "number", 0)


# ---- Backward. MXNet has no hook for it, but `backward` and `autograd.grad` call the
# same C function, which `install_backward` replaces.

_mxnet_differentiate = _LIB.MXAutogradBackwardEx


class BackwardCall:
    """A call of MXNet's backward, or of `autograd.grad`."""

    def __init__(self, arguments: tuple) -> None:
        self._arguments = arguments
        values = [getattr(argument, "value", argument) for argument in arguments[:8]]
        count, heads, gradients, num_variables, _, retain_graph, _, train_mode = values
        self.heads = [_array_of(heads[k]) for k in range(count)]
        # None stands for ones.
        self.gradients = list(map(_array_of, gradients or [None] * count))
        self.is_grad = num_variables > 0
        self.retain_graph, self.train_mode = bool(retain_graph), bool(train_mode)

    def run(self) -> None:
        mx.base.check_call(_mxnet_differentiate(*self._arguments))


@functools.lru_cache(maxsize=None)
def install_backward(backward: Callable[[BackwardCall], None]) -> None:
    """Call `backward` in place of MXNet's function, except in `differentiate`."""

    def replacement(*arguments):
        # The caller shows whether this call is from `differentiate`.
        caller = sys._getframe(1).f_back
        if caller is not None and caller.f_code is differentiate.__code__:
            return _mxnet_differentiate(*arguments)
        backward(BackwardCall(arguments))
        release_owners()
        return 0

    _LIB.MXAutogradBackwardEx = replacement


def differentiate(
    heads: Sequence,
    gradients: Sequence,
    variables: Sequence,
    retain_graph: bool,
    train_mode: bool,
) -> list[mx.nd.NDArray]:
    """Run MXNet's own `backward`, or `autograd.grad` if there are variables."""
    if variables:
        options = retain_graph, False, train_mode
        return autograd.grad(heads, variables, gradients, *options)
    autograd.backward(heads, gradients, retain_graph, train_mode)
    return []


def free_graphs(heads: Sequence) -> None:
    """Free the graphs behind some heads without running their backward.

    A backward frees the graphs of all its heads. This one has a further head, which
    depends on another variable, and asks for the gradient of this variable only. So no
    operator of the other graphs runs.
    """
    variable = _unused_variable(heads[0].context)
    was_recording = autograd.set_recording(True)
    try:
        heads = [*heads, _identity(variable)]
    finally:
        autograd.set_recording(was_recording)
    differentiate(heads, heads, [variable], False, True)  # any gradients serve


def _array_of(handle):
    """Return a new NDArray for a handle, or None for no handle."""
    if handle is None:
        return None
    copy = ctypes.c_void_p()
    code = _LIB.MXShallowCopyNDArray(ctypes.c_void_p(handle), ctypes.byref(copy))
    mx.base.check_call(code)
    return mx.nd.NDArray(copy)
