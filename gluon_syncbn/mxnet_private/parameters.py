"""Arrays of Gluon's parameters."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx

from ..compat import IS_GLUON_2

_Parameter = mx.gluon.Parameter
list_contexts = _Parameter.list_device if IS_GLUON_2 else _Parameter.list_ctx
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
        return list_contexts(parameter)
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


def copy_to_others(arrays: Sequence) -> None:
    """Copy the first array to the others."""
    for array in arrays[1:]:
        arrays[0].copyto(array)
