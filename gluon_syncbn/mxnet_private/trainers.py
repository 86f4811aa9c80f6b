"""Private state of gluon.Trainer, which publishes only its rate and its optimizer."""

from __future__ import annotations

import contextlib
from functools import partial
from operator import attrgetter
from typing import Any, Callable, Iterator

import mxnet as mx

from .parameters import (
    collect_lent,
    copy_to_others,
    data_of,
    gradients_of,
    is_fresh,
    is_replicated,
    is_summed,
    mark_fresh,
    trainer_of,
)

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
    name = getattr(kvstore, "type", kvstore) or "local"
    return name.startswith(("local", "device", "nccl"))


def workers_of(trainer: mx.gluon.Trainer) -> int:
    """Return how many processes the kvstore sums over; known once a step has begun."""
    return trainer._kvstore.num_workers if trainer._distributed else 1


def has_kvstore(trainer: mx.gluon.Trainer) -> bool:
    """Return True if a trainer's first step has chosen its kvstore."""
    return getattr(trainer, "_kv_initialized", False)  # unset during construction


def update_on_devices(trainer: mx.gluon.Trainer) -> None:
    """Make a parallel net's trainer update on devices, not on a local kvstore."""
    is_local = _is_local(trainer._kvstore_params["kvstore"])
    is_parallel = any(map(is_replicated, trainer._params))
    if not is_parallel or not is_local or trainer._contains_sparse_weight:
        return
    # A kvstore updates its own copy of weights, which a program cannot change.
    trainer._kvstore_params["update_on_kvstore"] = False
    if trainer._update_on_kvstore:
        states = trainer._kvstore._updater.get_states()
        for updater in trainer._updaters:
            updater.set_states(states)
        trainer._reset_kvstore()


@contextlib.contextmanager
def reduced_once(trainer: mx.gluon.Trainer) -> Iterator[None]:
    """Reduce the gradients of parallel nets between processes only.

    Each device already has the sum over this process. So at most one gradient of each
    parameter is reduced, and the result is copied to each device.
    """
    is_local = trainer._kvstore and not trainer._distributed
    is_skipped = is_local and not trainer._update_on_kvstore
    summed = [p for p in trainer._params if is_summed(p) and gradients_of(p)]
    # A Trainer skips parameters whose grad_req is "null".
    with _one_replica_each(trainer, summed, "null" if is_skipped else None):
        yield
    if not is_skipped:
        for parameter in summed:
            gradients = gradients_of(parameter)
            copy_to_others(gradients[0], gradients)


@contextlib.contextmanager
def updated_once(trainer: mx.gluon.Trainer) -> Iterator[None]:
    """Update a parallel net's parameters on the first device, then copy them."""
    parallel = [p for p in trainer._params if is_replicated(p) and gradients_of(p)]
    for kind in "_grad", "_data":  # copies the program's changes to all devices
        collect_lent(parallel, kind)
    # An optimizer that draws random numbers would update each device differently.
    with _one_replica_each(trainer, parallel):
        yield
    for parameter in parallel:
        first, *others = data_of(parameter)
        if not is_fresh(first):  # an update marks the gradient as stale
            copy_to_others(first, others)
            mark_fresh(others, False)


def share_states(trainer: mx.gluon.Trainer) -> None:
    """Copy the first device's optimizer states to the others, after `updated_once`."""
    first, *others = trainer._updaters
    for other in others:
        other.set_states(first.get_states())


@contextlib.contextmanager
def _one_replica_each(trainer, parameters, grad_req=None):
    saved, chosen = trainer._params, set(map(id, parameters))
    trainer._params = [
        _OneReplica(p, grad_req or p.grad_req) if id(p) in chosen else p for p in saved
    ]
    try:
        yield
    finally:
        trainer._params = saved


class _OneReplica:
    """A parameter that lists all its data, but only its first gradient."""

    def __init__(self, parameter, grad_req):
        self._parameter, self.grad_req = parameter, grad_req

    def __getattr__(self, name):
        return getattr(self._parameter, name)

    def list_grad(self):
        return self._parameter.list_grad()[:1]


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
