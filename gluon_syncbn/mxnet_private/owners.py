"""Parameters of parallel nets: the first device owns each value and each gradient."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from ..compat import IS_GLUON_2
from . import tape
from .arrays import copyto, write_sum
from .parameters import (
    contexts_of,
    copy_to_others,
    gradients_of,
    is_fresh,
    list_contexts,
    mark_fresh,
)


class _Thread(threading.local):
    sees_owners = False  # True while a trainer's step runs in the thread


_thread = _Thread()


class ParallelParameter(mx.gluon.Parameter):
    """A parameter of a parallel net. Its first array and first gradient own its value.

    The methods that return an array are replaced, because each way from a program to an
    array leads through them. A program that names no context gets the owner. An array
    on another context is a copy, which is made when a device or a program asks for it.
    So a program may change the owner at any time, and changes of copies are lost.
    """

    is_summed: bool = False  # True if the first gradient is the whole batch's
    _thread_state: Any  # its `contexts` are () unless the thread runs a net on a device
    _is_lent: bool = False  # True if a program has the owner, which may change then
    _stale: set  # the indices of copies that are older than the owner

    def __reduce__(self) -> tuple:  # the class has no name by which pickle finds it
        return _make, (type(self).__bases__[1],), vars(self)

    def data(self, ctx: Any = None, device: Any = None) -> Any:
        place = device if ctx is None else ctx
        if self._data and len(self._data) > 1 and not _thread.sees_owners:
            contexts, is_on_device = list_contexts(self), self._thread_state.contexts
            if not is_on_device:
                # A block of Gluon asks for the arrays of its input's context.
                caller = sys._getframe(1).f_globals.get("__name__")
                is_program = caller != "mxnet.gluon.block"
                if is_program:
                    place = place or contexts[0]
                if self._is_lent or (is_program and place == contexts[0]):
                    self._lend()
            place = place or mx.context.current_context()
            index = contexts.index(place) if place in contexts else 0  # Gluon refuses
            # Forward writes parameters without gradients, so on a device their copies
            # could wait for work that waits for this device.
            is_kept = is_on_device and self.grad_req == "null"
            if index in self._stale and not is_kept:
                copy_owners([self], index)
        return super().data(place)

    def list_data(self) -> list:
        arrays = super().list_data()
        if _thread.sees_owners:
            return arrays[:1]
        if not self._thread_state.contexts:
            self._lend()
            copy_owners([self])
        return arrays

    def grad(self, ctx: Any = None, device: Any = None) -> Any:
        place = device if ctx is None else ctx
        if self._grad and not self._thread_state.contexts:
            contexts = list_contexts(self)
            place = place or contexts[0]
            if self.is_summed and place != contexts[0]:
                copy_to_others(self._grad)
        return super().grad(place)

    def list_grad(self) -> list:
        gradients = super().list_grad()
        if _thread.sees_owners:
            return gradients[:1]
        if self.is_summed and len(gradients) > 1:
            copy_to_others(gradients)
        return gradients

    def _lend(self):
        self._is_lent = True
        self._stale.update(range(1, len(self._data)))

    def _reduce(self) -> mx.nd.NDArray:
        """Return the value to save; Gluon's mean over contexts would round it."""
        mx.nd.waitall()  # oneDNN may change a weight's layout in pending work
        return self._check_and_get(self._data, list)[0].copyto(mx.cpu())


@lru_cache(maxsize=None)
def _parallel_class(cls: Any) -> Any:
    return type(cls.__name__, (ParallelParameter, cls), {"__module__": cls.__module__})


@contextmanager
def changing_owners(parameters: Iterable) -> Iterator[None]:
    """Show a trainer only the owners of parallel parameters, and note their changes."""
    previous, _thread.sees_owners = _thread.sees_owners, True
    try:
        yield
    finally:
        _thread.sees_owners = previous
        for parameter in parameters:
            parameter._stale.update(range(1, len(parameter._data or ())))


def mark_copies_fresh(parameter: Any, fresh: bool) -> None:
    if parameter._grad:
        mark_fresh(parameter._data[1:], fresh)


def set_summed(parameters: Iterable, summed: bool) -> None:
    """Set whether the next backward writes owners only, or each device's gradient."""
    for parameter in parameters:
        if isinstance(parameter, ParallelParameter) and parameter.is_summed != summed:
            parameter.is_summed = summed
            # A Trainer must find no old gradient but the owner's.
            mark_copies_fresh(parameter, summed)


def stale_parameters(parameters: Iterable) -> list:
    """Return the parallel parameters whose copies may differ from their owners."""
    parallel = [p for p in parameters if isinstance(p, ParallelParameter)]
    return [p for p in parallel if p._is_lent or p._stale]


def copy_owners(parameters: Sequence, index: int | None = None) -> None:
    """Make copies of the owners' values, or only the ones with an index."""
    if not parameters:
        return
    was_recording = autograd.set_recording(False)
    # A graph that Gluon 2 traces would also take the copies.
    was_traced = IS_GLUON_2 and mx._deferred_compute.set_deferred_compute(False)
    try:
        for parameter in parameters:
            arrays: Any = parameter._data or ()
            for k in range(1, len(arrays)) if index is None else [index]:
                parameter._stale.discard(k)  # another thread may mark it meanwhile
                copyto(arrays[0].as_nd_ndarray(), out=arrays[k].as_nd_ndarray())
    finally:
        autograd.set_recording(was_recording)
        if was_traced:
            mx._deferred_compute.set_deferred_compute(True)


def is_replicated(parameter: Any) -> bool:
    return isinstance(parameter, ParallelParameter)


def replicate(parameter: Any, thread_state: Any) -> None:
    """Turn a dense parameter into a ParallelParameter."""
    cls: Any = type(parameter)
    parameter.__class__ = _parallel_class(cls)
    parameter._thread_state = thread_state
    parameter._stale = set()
    parameter._is_lent = bool(parameter._data)  # the program may have an array already


def _make(cls):
    return object.__new__(_parallel_class(cls))


def undo_replicate(parameter: Any) -> None:
    if is_replicated(parameter):
        copy_owners([parameter])
        if parameter.is_summed:  # a Trainer will sum the gradients of all devices
            for gradient in gradients_of(parameter)[1:]:
                gradient = gradient.as_nd_ndarray()
                mx.nd.zeros_like(gradient, out=gradient)
            mark_copies_fresh(parameter, is_fresh(parameter._data[0]))
        parameter.__class__ = type(parameter).__bases__[1]
        for name in ParallelParameter.__annotations__:
            vars(parameter).pop(name, None)


# ---- Variables: parameters' arrays in the graphs of autograd.

# {name of an owner's copy in graphs: the parallel parameter}
_copies: Any = weakref.WeakValueDictionary()


class Variable(NamedTuple):
    """A parameter's array on a device, as the graphs of a call know it."""

    parameter: Any
    arrays: list  # the parameter's arrays and gradients at the time of the call
    gradients: list
    names: list  # the arrays' names in graphs
    place: int  # the array's index in the lists
    is_owned: bool  # True if the first gradient is the sum of all


class Variables:
    """The variables of a net's parameters."""

    def __init__(self) -> None:
        # Each parameter's lists of arrays and gradients in the latest `update`
        self._lists: dict = {}
        self.by_context: dict = {}  # {context: {name: Variable}} of these lists

    def __reduce__(self) -> tuple:  # the arrays of a deep copy are no variables
        return Variables, (), {"_lists": self._lists}

    def update(
        self, parameters: Iterable, adopt: Callable[[Any], None] | None = None
    ) -> bool:
        """Set the net's parameters; return True if arrays of one were replaced.

        `adopt` is called with each parameter whose lists of arrays or gradients are not
        the ones of the latest call.
        """
        lists, changed, was_replaced = {}, [], False
        for parameter in parameters:
            data, gradients = self._lists.get(parameter, ((), None))
            lists[parameter] = parameter._data, parameter._grad
            if data is not parameter._data or gradients is not parameter._grad:
                changed.append(parameter)
                was_replaced = was_replaced or bool(data)
        if adopt is not None:
            for parameter in changed:
                adopt(parameter)
        if changed or len(lists) != len(self._lists):
            self._lists, self.by_context = lists, _variables_of(lists)
        return was_replaced


def _variables_of(parameters):
    found: dict = {}
    for parameter in parameters:
        if parameter._grad:
            names, is_owned = tape.names_of(parameter._data), is_replicated(parameter)
            lists = parameter._data, parameter._grad, names
            for index, context in enumerate(contexts_of(parameter)):
                variable = Variable(parameter, *lists, index, is_owned)
                found.setdefault(context, {})[names[index]] = variable
                if index and is_owned:
                    _copies[names[index]] = parameter
    return found


def check_no_copies(names: set[str]) -> None:
    """Raise ValueError if a loss depends on a copy of a parameter of a parallel net.

    The caller's graph has such a copy only if the program kept an array that a device
    computed. In a `Devices.map` each device has its own gradient, which is not summed.
    """
    found = {name: p for name in names if (p := _copies.get(name)) is not None}
    for name in sorted(found, key=lambda name: int(name[3:])):
        if getattr(found[name], "is_summed", False):  # it may be a Parameter again
            raise ValueError(
                "the loss depends on an array that a parallel net computed on one "
                "device and did not return, so the rows of other devices would not "
                f"count. The array depends on the copy of {found[name].name} on that "
                "device. Return the array from the net, with one value per row."
            )


def write_gradients(items: Iterable, names: set[str]) -> None:
    """Write the sum of each gradient's parts, or add it as grad_req says.

    An item has a Variable, an index of a gradient, and the gradient's parts. The
    caller's graph has already written the gradients of its variables `names`.
    """
    for variable, index, parts in items:
        is_add = variable.parameter.grad_req == "add"
        write_sum(
            parts, variable.gradients[index], is_add or variable.names[index] in names
        )
        variable.arrays[index]._fresh_grad = True
