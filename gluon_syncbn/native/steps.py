"""A step of a gluon.Trainer waits for its gradients, then updates.

It must not know how gradients are computed. docs/design/mxnet.md says what a failed
step leaves.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from typing import Iterable, Iterator

import mxnet as mx

from ..mxnet_private import trainers
from ..mxnet_private.arrays import push
from ..mxnet_private.parameters import gradients_of, is_parallel
from . import failures
from .interrupts import DeferredSignals
from .library import load
from .program import warn
from .world import world

# By key the layers of the process; they have `name`, `parameters`, `is_alone()` and
# `is_connected()`.
layers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_guarded: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # trainers, by id


def alive(values: weakref.WeakValueDictionary) -> list:
    """Return the values in order, also while another thread adds some."""
    return [value for value in (r() for r in values.valuerefs()) if value is not None]


def guard_trainers(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Lets the steps of the trainer that these parameters have, or get, wait."""
    for parameter in parameters:
        trainers.when_trainer_is_set(parameter, _guard)


def release_trainers(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Undoes `guard_trainers`, but for what other layers have, too."""
    kept = {id(p) for layer in alive(layers) for p in layer.parameters}
    for parameter in parameters:
        if id(parameter) not in kept and not is_parallel(parameter):
            trainers.forget_trainers(parameter)
    for trainer in alive(_guarded):
        is_needed = any(map(is_parallel, trainers.parameters_of(trainer)))
        if not is_needed and not _layers_of(trainer):
            trainers.unwrap(trainer, _AROUND)
            _guarded.pop(id(trainer), None)


def _guard(trainer):
    if id(trainer) not in _guarded:
        trainers.wrap(trainer, **_AROUND)
        _guarded[id(trainer)] = trainer
    if trainers.has_kvstore(trainer):
        trainers.update_on_devices(trainer)


@contextmanager
def _around_step(trainer: mx.gluon.Trainer) -> Iterator[None]:
    size, is_local = world().size, trainers.sums_in_this_process(trainer)
    if size > 1 and is_local and any(x.is_connected() for x in _layers_of(trainer)):
        raise RuntimeError(
            f"a gluon.Trainer adds gradients up in its own process only, but {size} "
            "processes train: use gluon_syncbn.distributed.Trainer, Horovod or "
            "kvstore='dist_sync'; a program that adds up itself calls "
            "allreduce_grads() and update() in place of step()"
        )
    with DeferredSignals():  # queued as a whole
        yield


@contextmanager
def _around_init(trainer: mx.gluon.Trainer) -> Iterator[None]:
    """In the block a trainer copies parameters for the first time.

    The copies are made in the queue of the first step, so if that fails they could be
    of uninitialized memory.
    """
    if trainers.not_copied_yet(trainer):
        _warn_of_shards(trainer)
        mx.nd.waitall()
    with DeferredSignals():  # a key can be initialized once
        yield
    if trainers.workers_of(trainer) > 1:
        # MXNet does not order the copies before the first gradients: servers that have
        # added these up would send them as the parameters.
        mx.nd.waitall()


@contextmanager
def _around_kvstore(trainer: mx.gluon.Trainer) -> Iterator[None]:
    trainers.update_on_devices(trainer)
    yield


@contextmanager
def _around_reduction(trainer: mx.gluon.Trainer) -> Iterator[None]:
    # The reduction is what updates on a kvstore; elsewhere it overlaps with backward.
    if trainers.updates_on_kvstore(trainer):
        _await_gradients(trainer)
    with DeferredSignals(), trainers.reduced_once(trainer):
        yield


@contextmanager
def _around_update(trainer: mx.gluon.Trainer) -> Iterator[None]:
    is_done = trainers.updates_on_kvstore(trainer)
    if not is_done:
        _await_gradients(trainer)
    is_once = nullcontext() if is_done else trainers.updated_once(trainer)
    with DeferredSignals(), is_once:
        yield


_AROUND = {
    "step": _around_step,
    "_init_kvstore": _around_kvstore,
    "_init_params": _around_init,
    "_allreduce_grads": _around_reduction,
    "_update": _around_update,
}


def _await_gradients(trainer):
    """Raises the error of a gradient, or of a layer, before an update is queued.

    A gradient may be computed without an error and from memory that was never written:
    a program that reads its loss clears the error for all that is still queued.
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
    failures.check_thread()


def _warn_of_shards(trainer):
    """A kvstore connects the workers' gradients, but not their layers."""
    workers = trainers.workers_of(trainer)
    alone = [layer.name for layer in _layers_of(trainer) if layer.is_alone()]
    if workers > 1 and alone:
        warn(
            f"the trainer's kvstore has {workers} workers, but SyncBatchNorm "
            f"'{alone[0]}' is connected with no other process, so each worker "
            "normalizes over its own shard only: start the workers with mpirun, and "
            "call gluon_syncbn.distributed.init() first, see "
            "docs/guides/kvstore.md"
        )


def _layers_of(trainer):
    own = set(map(id, trainers.parameters_of(trainer)))
    return [x for x in alive(layers) if own & set(map(id, x.parameters))]
