"""Private state of gluon.Trainer, which publishes only its rate and its optimizer."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Callable, Iterable, Iterator

import mxnet as mx

from .arrays import write_sum
from .owners import ParallelParameter, mark_copies_fresh
from .parameters import copy_to_others, is_fresh, mark_fresh, trainer_of

parameters_of = attrgetter("_params")  # ordered by the optimizer's index
updates_on_kvstore = attrgetter("_update_on_kvstore")  # False: on each device


def not_copied_yet(trainer: mx.gluon.Trainer) -> list:
    """Return initialized parameters that the kvstore does not have yet."""
    return [p for p in trainer._params_to_init if not p._deferred_init]


def sums_in_this_process(trainer: mx.gluon.Trainer, own_class: Any) -> bool:
    """Return True unless the trainer may sum gradients over processes."""
    is_inherited = own_class._allreduce_grads is mx.gluon.Trainer._allreduce_grads
    return is_inherited and _is_local(trainer._kvstore_params["kvstore"])


def _is_local(kvstore):
    name = getattr(kvstore, "type", kvstore) or "local"  # None: no kvstore
    return name.startswith(("local", "device", "nccl"))


def workers_of(trainer: mx.gluon.Trainer) -> int:
    """Return how many processes the kvstore sums over; known once a step has begun."""
    return trainer._kvstore.num_workers if trainer._distributed else 1


def has_kvstore(trainer: mx.gluon.Trainer) -> bool:
    """Return True if a trainer's first step has chosen its kvstore."""
    return getattr(trainer, "_kv_initialized", False)  # unset during construction


def update_owners(trainer: mx.gluon.Trainer) -> None:
    """Make a parallel net's trainer update the owners, not a local kvstore's weights.

    A program cannot change weights of a kvstore.
    """
    settings, is_dense = trainer._kvstore_params, not trainer._contains_sparse_weight
    if is_dense and _is_local(settings["kvstore"]) and parallel_parameters(trainer):
        settings["update_on_kvstore"] = False
        if trainer._update_on_kvstore:
            states = trainer._kvstore._updater.get_states()
            for updater in trainer._updaters:
                updater.set_states(states)
        if trainer._kvstore:
            trainer._reset_kvstore()


@contextmanager
def without_kvstore(trainer: mx.gluon.Trainer) -> Iterator[None]:
    """Make a trainer choose no local kvstore if it has nothing to reduce.

    A deep copy of a net copies its trainer, and a kvstore cannot be copied.
    """
    settings = trainer._kvstore_params
    kvstore = settings["kvstore"]
    if _is_local(kvstore) and parallel_parameters(trainer) == trainer._params:
        settings["kvstore"] = None
    try:
        yield
    finally:
        settings["kvstore"] = kvstore


def use_replicas(trainer: mx.gluon.Trainer) -> None:
    """Undo `update_owners`: copy the owners' optimizer states to all devices."""
    first, *others = trainer._updaters
    for other in others:
        other.set_states(first.get_states())
    if has_kvstore(trainer) and not trainer._distributed:
        trainer._reset_kvstore()


def parallel_parameters(trainer: mx.gluon.Trainer) -> list:
    return [p for p in trainer._params if isinstance(p, ParallelParameter)]


def gradients_of(trainer: mx.gluon.Trainer) -> list:
    """Return all gradients that backward writes, of parallel parameters the owners."""
    return [
        gradient
        for p in trainer._params
        for gradient in (p._grad or ())[: 1 if getattr(p, "is_summed", False) else None]
    ]


def sum_gradients(parameters: Iterable) -> None:
    """Sum gradients that MXNet has written, in a `Devices.map` for each device.

    A copy that MXNet has not written since the last step may be an old sum.
    """
    for parameter in parameters:
        if parameter._grad and not parameter.is_summed:
            pairs = list(zip(parameter._data, parameter._grad))
            written = [gradient for data, gradient in pairs if is_fresh(data)]
            if written:
                write_sum(written, parameter._grad[0])
                copy_to_others(parameter._grad)
                mark_fresh(parameter._data)


def mark_used(parameters: Iterable) -> None:
    """Mark the gradients of a `Devices.map` as old; Gluon marks the owner's only."""
    for parameter in parameters:
        if not parameter.is_summed:
            mark_copies_fresh(parameter, False)


def when_trainer_is_set(parameter: mx.gluon.Parameter, act: Callable) -> None:
    """Call `act` with the parameter's trainer, and with each later one."""
    # A deep copy of a closure would refer to the original parameter.
    parameter._set_trainer = partial(_set_trainer, parameter, act)
    trainer = trainer_of(parameter)
    if trainer is not None:
        act(trainer)


def _set_trainer(parameter, act, trainer):
    type(parameter)._set_trainer(parameter, trainer)
    if trainer is not None:
        act(trainer)


def remove_trainer_callback(parameter: mx.gluon.Parameter) -> None:
    vars(parameter).pop("_set_trainer", None)
