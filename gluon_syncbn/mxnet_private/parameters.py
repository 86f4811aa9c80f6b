"""Arrays of Gluon's parameters, and the parameters of parallel nets."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from ..compat import IS_GLUON_2
from .arrays import copyto

_Parameter = mx.gluon.Parameter
_list_contexts = _Parameter.list_device if IS_GLUON_2 else _Parameter.list_ctx
move = _Parameter.reset_device if IS_GLUON_2 else _Parameter.reset_ctx

# True if backward has written an array's gradient since the last update. A Trainer
# reads and clears this mark.
is_fresh = attrgetter("_fresh_grad")
is_deferred = attrgetter("_deferred_init")  # truthy if initialization waits for a shape
gradient_storage = attrgetter("_grad_stype")  # known before gradients exist


def is_dense(parameter: Any) -> bool:
    return parameter._stype == "default"




def contexts_of(parameter: mx.gluon.Parameter) -> list[mx.Context]:
    """Return the contexts that a parameter is or will be initialized on, or []."""
    try:
        return _list_contexts(parameter)
    except RuntimeError:
        return []


def data_of(parameter: Any) -> Sequence:
    """Return a parameter's arrays on its contexts; () before it is initialized."""
    return parameter._data or ()  # `list_data` raises for sparse parameters


def gradients_of(parameter: Any) -> Sequence:
    """Return a parameter's gradients on its contexts, or () if it has none."""
    return parameter._grad or ()


def trainer_of(parameter: mx.gluon.Parameter) -> mx.gluon.Trainer | None:
    """Return a parameter's trainer or None; Gluon 2 stores a weak reference."""
    trainer = parameter._trainer
    trainer = trainer() if isinstance(trainer, weakref.ref) else trainer
    return trainer if isinstance(trainer, mx.gluon.Trainer) else None


def when_initialized(parameter: Any, act: Callable[[], None]) -> None:
    """Call `act` when the parameter gets its values; Gluon has no hook for that."""
    initialize = parameter._init_impl

    def initialize_and_act(data, ctx_list):
        initialize(data, ctx_list)
        parameter._init_impl = initialize
        act()

    parameter._init_impl = initialize_and_act


def mark_fresh(arrays: Iterable[mx.nd.NDArray], fresh: bool = True) -> None:
    for data in arrays:
        data._fresh_grad = fresh


def copy_to_others(source: mx.nd.NDArray, arrays: Iterable) -> None:
    for array in arrays:
        if array is not source:
            source.copyto(array)


# ---- Parameters of parallel nets.


class _Thread(threading.local):
    sees_owners = False  # True while a trainer's step runs in the thread


_thread = _Thread()


class ParallelParameter(_Parameter):
    """A parameter of a parallel net. Its first array and first gradient own its value.

    The methods that return an array are replaced, because each way from a program to an
    array leads through them. A program that names no context gets the owner. An array
    on another context is a copy, which is made when a device or a program asks for it.
    So a program may change the owner at any time, and changes of copies are lost.
    """

    is_summed: bool = False  # True if the first gradient is the whole batch's
    _thread_state: Any  # its `contexts` are () unless the thread runs a net on a device
    _is_lent: bool = False  # True if a program has the owner, so it may change at any time
    _version: int = 0  # counts changes of the owner
    _shared_version: int = 0  # the version that all copies have, or later ones
    _copied: dict  # {index of a copy: its version}, of copies made alone

    def __reduce__(self) -> tuple:  # the class has no name by which pickle finds it
        return _make, (type(self).__bases__[1],), vars(self)

    def data(self, ctx: Any = None, device: Any = None) -> Any:
        place = device if ctx is None else ctx
        if self._data and len(self._data) > 1 and not _thread.sees_owners:
            contexts, is_on_device = _list_contexts(self), self._thread_state.contexts
            if not is_on_device and not _called_by_gluon():
                place = place or contexts[0]
                if place == contexts[0]:
                    self._lend()
            place = place or mx.context.current_context()
            index = contexts.index(place) if place in contexts else 0  # Gluon refuses
            # Forward writes parameters without gradients, so on a device their copies
            # could wait for work that waits for this device.
            if index and not (is_on_device and self.grad_req == "null"):
                copied = max(self._shared_version, self._copied.get(index, 0))
                if copied != self._version:
                    copy_owners([self], [index])
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
            contexts = _list_contexts(self)
            place = place or contexts[0]
            if self.is_summed and place != contexts[0]:
                copy_to_others(self._grad[0], self._grad)
        return super().grad(place)

    def list_grad(self) -> list:
        gradients = super().list_grad()
        if _thread.sees_owners:
            return gradients[:1]
        if self.is_summed and len(gradients) > 1:
            copy_to_others(gradients[0], gradients)
        return gradients

    def _lend(self):
        self._is_lent = True
        self._version += 1

    def _reduce(self) -> mx.nd.NDArray:
        """Return the value to save; Gluon's mean over contexts would round it."""
        mx.nd.waitall()  # oneDNN may change a weight's layout in pending work
        return self._check_and_get(self._data, list)[0].copyto(mx.cpu())


_STATE = tuple(ParallelParameter.__annotations__)


@lru_cache(maxsize=None)
def _parallel_class(cls):
    return type(cls.__name__, (ParallelParameter, cls), {"__module__": cls.__module__})


def _called_by_gluon():
    """Return True if Gluon's Block, not the program, calls the caller's function.

    A block asks for the arrays of the current context, which is its input's.
    """
    return sys._getframe(2).f_globals.get("__name__") == "mxnet.gluon.block"


@contextmanager
def changing_owners(parameters: Iterable) -> Iterator[None]:
    """Show a trainer only the owners of parallel parameters, and note their changes."""
    previous, _thread.sees_owners = _thread.sees_owners, True
    try:
        yield
    finally:
        _thread.sees_owners = previous
        for parameter in parameters:
            parameter._version += 1


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
    return [p for p in parallel if p._is_lent or p._shared_version != p._version]


def copy_owners(parameters: Iterable, indices: Sequence[int] = ()) -> None:
    """Make copies of the owners' values, by default all of them."""
    was_recording = autograd.set_recording(False)
    try:
        for parameter in parameters:
            arrays, version = parameter._data or (), parameter._version
            for index in indices or range(1, len(arrays)):
                copyto(arrays[0].as_nd_ndarray(), out=arrays[index].as_nd_ndarray())
                parameter._copied[index] = version
            if not indices:
                parameter._shared_version = version
    finally:
        autograd.set_recording(was_recording)


def is_replicated(parameter: Any) -> bool:
    return isinstance(parameter, ParallelParameter)


def replicate(parameter: Any, thread_state: Any) -> None:
    """Turn a dense parameter into a ParallelParameter."""
    parameter.__class__ = _parallel_class(type(parameter))
    parameter._thread_state = thread_state
    parameter._copied = {}
    parameter._is_lent = bool(parameter._data)  # the program may have an array already


def _make(cls):
    return object.__new__(_parallel_class(cls))


def undo_replicate(parameter: Any) -> None:
    if is_replicated(parameter):
        copy_owners([parameter])
        parameter.__class__ = type(parameter).__bases__[1]
        for name in _STATE:
            vars(parameter).pop(name, None)
