"""Make each step of a gluon.Trainer wait for its gradients before it updates.

docs/design/mxnet.md describes the state after a failed step.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Iterable, Iterator

import mxnet as mx

from ..mxnet_private import trainers
from ..mxnet_private.arrays import push
from ..mxnet_private.parameters import gradients_of, is_replicated
from . import failures
from .failures import warn
from .interrupts import DeferredSignals
from .library import load
from .processes import world

# All layers by key. They have `name`, `parameters`, `is_alone()` and `is_connected()`.
layers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_guarded: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # trainers, by id


def list_alive(values: weakref.WeakValueDictionary) -> list:
    """Return the values in order, although another thread may add values."""
    return [value for value in (r() for r in values.valuerefs()) if value is not None]


def guard_trainers(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Make steps of the trainer that these parameters have, or get later, wait."""
    for parameter in parameters:
        trainers.when_trainer_is_set(parameter, _guard)


def release_trainers(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Undo `guard_trainers`, except for parameters that other layers also have."""
    kept = {id(p) for layer in list_alive(layers) for p in layer.parameters}
    for parameter in parameters:
        if id(parameter) not in kept and not is_replicated(parameter):
            trainers.forget_trainers(parameter)
    for trainer in list_alive(_guarded):
        is_needed = any(map(is_replicated, trainers.parameters_of(trainer)))
        if not is_needed and not _layers_of(trainer):
            trainers.unwrap(trainer, _WRAPPERS)
            _guarded.pop(id(trainer), None)


def _guard(trainer):
    if id(trainer) not in _guarded:
        trainers.wrap(trainer, **_WRAPPERS)
        _guarded[id(trainer)] = trainer
    if trainers.has_kvstore(trainer):
        trainers.update_on_devices(trainer)


@contextmanager
def _around_step(trainer: mx.gluon.Trainer) -> Iterator[None]:
    size, is_local = world().size, trainers.sums_in_this_process(trainer)
    if size > 1 and is_local and any(x.is_connected() for x in _layers_of(trainer)):
        raise RuntimeError(
            f"a gluon.Trainer sums gradients in its own process only, but {size} "
            "processes train. Use gluon_syncbn.distributed.Trainer, Horovod or "
            "kvstore='dist_sync'. If your program sums gradients, call "
            "allreduce_grads() and update() instead of step()."
        )
    with DeferredSignals():  # queued as a whole
        yield


@contextmanager
def _around_init(trainer: mx.gluon.Trainer) -> Iterator[None]:
    """Wait before a trainer copies parameters for the first time.

    The copies are queued with the first step. If that step fails, they could be copies
    of uninitialized memory.
    """
    if trainers.not_copied_yet(trainer):
        _warn_of_unconnected_layers(trainer)
        mx.nd.waitall()
    with DeferredSignals():  # a kvstore initializes a key only once
        yield
    if trainers.workers_of(trainer) > 1:
        # MXNet does not order the copies before the first gradients, so servers could
        # send the sum of gradients as the parameters.
        mx.nd.waitall()


@contextmanager
def _around_kvstore(trainer: mx.gluon.Trainer) -> Iterator[None]:
    trainers.update_on_devices(trainer)
    yield


@contextmanager
def _around_reduction(trainer: mx.gluon.Trainer) -> Iterator[None]:
    # A kvstore updates in the reduction, which otherwise overlaps with backward.
    if trainers.updates_on_kvstore(trainer):
        _await_gradients(trainer)
    with DeferredSignals(), trainers.reduced_once(trainer):
        yield


@contextmanager
def _around_update(trainer: mx.gluon.Trainer) -> Iterator[None]:
    if trainers.updates_on_kvstore(trainer):
        yield  # the reduction has updated
        return
    _await_gradients(trainer)
    with DeferredSignals(), trainers.updated_once(trainer):
        yield


_WRAPPERS = {
    "step": _around_step,
    "_init_kvstore": _around_kvstore,
    "_init_params": _around_init,
    "_allreduce_grads": _around_reduction,
    "_update": _around_update,
}


def _await_gradients(trainer):
    """Raise the error of a gradient, or of a layer, before an update is queued.

    The layer's error matters because a program that reads its loss clears the error
    for all queued work. A gradient may then be computed, without an error, from memory
    that was never written.
    """
    gradients = [
        gradient
        for parameter in trainers.parameters_of(trainer)
        if parameter.grad_req != "null"
        for gradient in gradients_of(parameter)
    ]
    ready = mx.nd.empty((1,), ctx=mx.cpu())
    push(load().gluon_syncbn_do_nothing, 0, ready.context, gradients, [ready])
    ready.wait_to_read()
    failures.raise_pending()


def _warn_of_unconnected_layers(trainer):
    """Warn if workers of a kvstore normalize alone, because it sums gradients only."""
    workers = trainers.workers_of(trainer)
    alone = [layer.name for layer in _layers_of(trainer) if layer.is_alone()]
    if workers > 1 and alone:
        warn(
            f"the trainer's kvstore has {workers} workers, but SyncBatchNorm "
            f"'{alone[0]}' is not connected with other processes, so each worker "
            "normalizes its own shard only. Start the workers with mpirun, and call "
            "gluon_syncbn.distributed.init() first, see docs/guides/kvstore.md."
        )


def _layers_of(trainer):
    own = set(map(id, trainers.parameters_of(trainer)))
    return [x for x in list_alive(layers) if own & set(map(id, x.parameters))]
