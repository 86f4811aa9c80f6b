"""Arrays of Gluon's parameters, and marks on them.

The public `list_data` and `list_grad` raise for sparse parameters, and for parameters
without arrays.
"""

from __future__ import annotations

import functools
import sys
import weakref
from operator import attrgetter, methodcaller
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx

from ..compat import IS_GLUON_2

_list_contexts = methodcaller("list_device" if IS_GLUON_2 else "list_ctx")
_reset_context = "reset_device" if IS_GLUON_2 else "reset_ctx"

# Truthy if initialization waits for the shape.
is_deferred = attrgetter("_deferred_init")
gradient_storage = attrgetter("_grad_stype")  # known before gradients exist
# True if backward has written an array's gradient since the last update. A Trainer
# reads and clears this mark, which the public NDArray does not have.
is_fresh = attrgetter("_fresh_grad")


def contexts_of(parameter: mx.gluon.Parameter) -> list[mx.Context]:
    """Return the contexts that a parameter is or will be initialized on, or []."""
    try:
        return _list_contexts(parameter)
    except RuntimeError:
        return []


def is_dense(parameter: mx.gluon.Parameter) -> bool:
    return parameter._stype == "default"


def move(parameter: mx.gluon.Parameter, contexts: Sequence[mx.Context]) -> None:
    getattr(parameter, _reset_context)(contexts)


def data_of(parameter: Any) -> Sequence:
    """Return a parameter's arrays on its contexts; () before it is initialized."""
    return parameter._data or ()


def gradients_of(parameter: Any) -> Sequence:
    """Return the gradients of `data_of`; () without a gradient."""
    return parameter._grad or ()


def save_value_of(parameter: Any, context: mx.Context | None) -> None:
    """Make Gluon save a parameter's value on one context; None undoes it.

    Gluon saves the mean over contexts, which rounds even if all values are equal.
    """
    if context is None:
        vars(parameter).pop("_reduce", None)
    elif "_reduce" not in vars(parameter) and is_dense(parameter):
        parameter._reduce = functools.partial(_on_cpu, parameter, context)


def _on_cpu(parameter, context):
    mx.nd.waitall()  # MXNet may still change a weight's layout, which no read waits for
    # The method `data` would record that a program may write to the array
    # (`lend_data`).
    value = next(data for data in data_of(parameter) if data.context == context)
    return value.copyto(mx.cpu())


def trainer_set(parameter: mx.gluon.Parameter) -> mx.gluon.Trainer | None:
    """Return a parameter's trainer or None; Gluon 2 stores a weak reference."""
    trainer = parameter._trainer
    trainer = trainer() if isinstance(trainer, weakref.ref) else trainer
    return trainer if isinstance(trainer, mx.gluon.Trainer) else None


def when_initialized(parameter: Any, act: Callable[[], None]) -> None:
    """Call `act` once the parameter gets its values; Gluon has no hook for that."""
    initialize = parameter._init_impl

    def initialize_and_act(data, ctx_list):
        initialize(data, ctx_list)
        parameter._init_impl = initialize
        act()

    parameter._init_impl = initialize_and_act


def mark_fresh(arrays: Iterable[mx.nd.NDArray], fresh: bool = True) -> None:
    """Set the mark that `is_fresh` reads."""
    for data in arrays:
        data._fresh_grad = fresh


def with_gradients(parameters: Iterable) -> list[tuple[Any, list]]:
    """Return the parameters that have gradients, each with its (data, gradient)s."""
    return [(p, list(zip(p._data, p._grad))) for p in parameters if p._data and p._grad]


def not_adopted(parameters: Iterable, arrays: dict) -> list:
    """Return the parameters without a mark, or with other arrays than in `arrays`."""
    return [
        parameter
        for parameter in parameters
        if parameter._data is None
        or arrays.get(parameter) is not parameter._data
        or not hasattr(parameter, "_gluon_syncbn_is_summed")
    ]


def is_parallel(parameter: mx.gluon.Parameter) -> bool:
    """Return True if a parameter belongs to a parallel net."""
    return hasattr(parameter, "_gluon_syncbn_is_summed")


def is_summed(parameter: mx.gluon.Parameter) -> bool:
    """Return True if each device has the gradient of the whole batch."""
    return getattr(parameter, "_gluon_syncbn_is_summed", False)


def set_summed(parameters: Iterable[mx.gluon.Parameter], summed: bool) -> None:
    """Set what `is_summed` returns, and `is_parallel` to True."""
    for parameter in parameters:
        parameter._gluon_syncbn_is_summed = summed


def unset_parallel(parameter: mx.gluon.Parameter) -> None:
    vars(parameter).pop("_gluon_syncbn_is_summed", None)


def lend_data(parameter: mx.gluon.Parameter, here: Any) -> None:
    """Record which array a parameter's method `data` returns to the program.

    `here.contexts` is empty in a call by the program.
    """
    parameter.data = _LentData(parameter, here)


def keep_data(parameter: mx.gluon.Parameter) -> None:
    vars(parameter).pop("data", None)


def collect_lent(parameters: Iterable) -> None:
    """Copy lent arrays, to which a program may have written, to the other devices."""
    replaced = [vars(p)["data"] for p in parameters if "data" in vars(p)]
    lent = [data for data in replaced if data.lent]
    if lent:
        # A prediction re-lays weights in place by work that no copy waits for.
        mx.nd.waitall()
        with mx.autograd.pause():
            for data in lent:
                data.collect()


class _LentData:
    """Replacement for a parameter's method `data`."""

    def __init__(self, parameter, here):
        self._parameter, self._here = parameter, here
        self.lent = None  # the context of the array that was returned last

    def __call__(self, *args, **kwargs):
        array = type(self._parameter).data(self._parameter, *args, **kwargs)
        if not self._here.contexts and len(self._parameter._data) > 1:
            self.lent = array.context
        return array

    def collect(self):
        """Copy the array that was returned to the other devices."""
        arrays = {data.context: data for data in data_of(self._parameter)}
        source = arrays.pop(self.lent, None)
        if source is None:  # the parameter has been moved
            self.lent = None
            return
        for data in arrays.values():
            source.copyto(data)
        # The parameter has one reference, this function two. A program may keep
        # another.
        if sys.getrefcount(source) <= 3:
            self.lent = None
