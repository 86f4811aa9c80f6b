"""Arrays of Gluon's parameters, and the parameters of parallel nets."""

from __future__ import annotations

import sys
import weakref
from operator import attrgetter
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx

from ..compat import IS_GLUON_2

_Parameter = mx.gluon.Parameter
_list_contexts = _Parameter.list_device if IS_GLUON_2 else _Parameter.list_ctx
move = _Parameter.reset_device if IS_GLUON_2 else _Parameter.reset_ctx

is_deferred = attrgetter("_deferred_init")  # truthy if initialization waits for a shape
gradient_storage = attrgetter("_grad_stype")  # known before gradients exist
# True if backward has written an array's gradient since the last update. A Trainer
# reads and clears this mark.
is_fresh = attrgetter("_fresh_grad")


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


def having_gradients(parameters: Iterable) -> list[tuple[Any, list]]:
    """Return the parameters that have gradients, with their pairs (data, gradient)."""
    return [(p, list(zip(p._data, p._grad))) for p in parameters if p._data and p._grad]


def copy_to_others(source: mx.nd.NDArray, arrays: Iterable) -> None:
    for array in arrays:
        if array is not source:
            source.copyto(array)


# ---- Parameters of parallel nets.


class Replicas:
    """A replacement for the method `_check_and_get` of a parallel net's parameter.

    Gluon calls this method to return one of the parameter's arrays, or gradients, to
    the program. This array is called lent, because the program may write to it. The net
    and its trainer call `collect_lent` before they use the parameter.
    """

    contexts: Sequence  # the net's devices
    arrays: Any  # the parameter's arrays in the latest call of `replicate`

    def __init__(self, parameter: Any, thread_state: Any) -> None:
        self._parameter, self._thread_state = parameter, thread_state
        self.is_summed = False  # True if each device has the whole batch's gradient
        # {"_data" or "_grad": {context of a lent array: its value when it was lent}}.
        # The value of the first one is None, because `collect` does not compare it.
        self.lent: dict = {}

    def __call__(self, arrays: Any, context: Any) -> Any:
        parameter = self._parameter
        get = type(parameter)._check_and_get
        # Gluon passes the type `list` to get all arrays. `_thread_state.contexts` is
        # empty except in threads that run the net on a device.
        is_for_program = not self._thread_state.contexts and context is not list
        if not is_for_program or not arrays or len(arrays) == 1:
            return get(parameter, arrays, context)
        kind = "_grad" if arrays is parameter._grad else "_data"
        if context is None:
            context = mx.context.current_context()  # as in Gluon
            if context not in contexts_of(parameter):
                context = self.contexts[0]
            if context not in self.lent.get(kind, {context}):
                collect_lent([parameter], kind)
        array = get(parameter, arrays, context)
        lent = self.lent.setdefault(kind, {})
        if context not in lent:
            with mx.autograd.pause():  # a copy that is recorded would stay in a graph
                lent[context] = array.copy() if lent else None
        return array

    def value(self) -> mx.nd.NDArray:
        """Return the value to save; Gluon's mean over contexts would round it."""
        mx.nd.waitall()  # oneDNN may change a weight's layout in pending work
        parameter = self._parameter
        arrays = type(parameter)._check_and_get(parameter, parameter._data, list)
        on_first = [a for a in arrays if a.context == self.contexts[0]]
        return (on_first or arrays)[0].copyto(mx.cpu())  # the parameter may have moved

    def collect(self, kind: str) -> None:
        """Find the lent array that the program has changed; copy it to all devices.

        Changes of several arrays are assumed to be equal. The first array has no former
        value to compare, so it is copied unless another one has changed.
        """
        arrays, source = getattr(self._parameter, kind) or (), None
        lent = self.lent.pop(kind, None)
        if lent is None:  # `kind` is "_grad"; the program may have changed data().grad
            lent = dict.fromkeys(list(self.lent["_data"])[-1:])
        for context, former in lent.items():
            array = next((a for a in arrays if a.context == context), None)
            if array is not None:  # else the parameter has been moved
                if source is None or (array.asnumpy() != former.asnumpy()).any():
                    source = array
        if source is None:
            return
        with mx.autograd.pause():
            copy_to_others(source, arrays)
            array = source = None
            # `arrays`, `a` and getrefcount's argument are three references to an array.
            # If there are more, the program may still write to the array.
            kept = [a for a in arrays if a.context in lent and sys.getrefcount(a) > 3]
            if kept:
                former = [None, *(a.copy() for a in kept[1:])]
                self.lent[kind] = dict(zip((a.context for a in kept), former))


def replicate(parameter: Any, contexts: Sequence, thread_state: Any) -> bool:
    """Add a dense parameter to a parallel net; return True if it belonged to none."""
    if parameter._stype != "default":
        return False
    is_new = not is_replicated(parameter)
    if is_new:
        parameter._check_and_get = Replicas(parameter, thread_state)
        parameter._reduce = parameter._check_and_get.value
    replicas = parameter._check_and_get
    replicas.contexts, replicas.arrays = contexts, parameter._data
    return is_new


def set_summed(parameters: Iterable, summed: bool) -> None:
    for parameter in parameters:
        if isinstance(parameter._check_and_get, Replicas):
            parameter._check_and_get.is_summed = summed


def undo_replicate(parameter: mx.gluon.Parameter) -> None:
    for name in "_check_and_get", "_reduce":
        vars(parameter).pop(name, None)


def is_replicated(parameter: Any) -> bool:
    return isinstance(parameter._check_and_get, Replicas)


def not_replicated(parameters: Iterable, contexts: Sequence) -> list:
    """Return the parameters whose arrays and contexts `replicate` has not stored."""
    return [
        p
        for p in parameters
        if not isinstance(p._check_and_get, Replicas)
        or p._data is None
        or p._check_and_get.arrays is not p._data
        or p._check_and_get.contexts != contexts
    ]


def is_summed(parameter: Any) -> bool:
    return is_replicated(parameter) and parameter._check_and_get.is_summed


def collect_lent(parameters: Iterable, kind: str = "_data") -> None:
    getters = [parameter._check_and_get for parameter in parameters]
    replicas = [get for get in getters if isinstance(get, Replicas)]
    lent = [each for each in replicas if each.lent.keys() & {kind, "_data"}]
    if lent and kind == "_data":
        # oneDNN changes the layout of weights in place, in work that no copy waits for.
        mx.nd.waitall()
    for each in lent:
        each.collect(kind)
