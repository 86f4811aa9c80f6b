"""Guarded gluon.Trainers: a step waits for its gradients before it updates."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import lru_cache
from typing import Iterable

import mxnet as mx

from ..mxnet_private import trainers
from ..mxnet_private.owners import changing_owners, is_replicated
from ..mxnet_private.parameters import trainer_of
from .failures import raise_pending
from .interrupts import DeferredSignals
from .processes import world
from .program_lines import warn

# {key: the Synchronization of a layer}
layers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def guard_trainers(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Guard the trainers that parameters have now or get later."""
    for parameter in parameters:
        trainers.when_trainer_is_set(parameter, _guard)


def release_trainers(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Undo `guard_trainers` for parameters that no layer and no parallel net has."""
    kept = {id(p) for layer in _living_layers() for p in layer.parameters}
    for parameter in parameters:
        if id(parameter) not in kept and not is_replicated(parameter):
            trainers.remove_trainer_callback(parameter)
    for trainer in set(filter(None, map(trainer_of, parameters))):
        is_needed = any(map(is_replicated, trainers.parameters_of(trainer)))
        if isinstance(trainer, _Guarded) and not is_needed and not _layers_of(trainer):
            trainer.__class__ = _own_class(trainer)


def _guard(trainer):
    if not isinstance(trainer, _Guarded):
        trainer.__class__ = _guarded_class(type(trainer))
    if trainers.has_kvstore(trainer):
        trainers.update_owners(trainer)


@lru_cache(maxsize=None)
def _guarded_class(cls):
    return type(cls.__name__, (_Guarded, cls), {"__module__": cls.__module__})


def _own_class(trainer):
    return type(trainer).__bases__[1]


class _Guarded(mx.gluon.Trainer):
    """Methods that wrap the methods of a trainer's own class."""

    def step(self, *args, **kwargs):
        size = world().size
        is_local = trainers.sums_in_this_process(self, _own_class(self))
        if size > 1 and is_local and any(x.is_connected() for x in _layers_of(self)):
            raise RuntimeError(
                "a gluon.Trainer sums gradients in its own process only, but "
                f"{size} processes train. Use gluon_syncbn.distributed.Trainer, "
                "Horovod or kvstore='dist_sync'. If your program sums gradients, call "
                "allreduce_grads() and update() instead of step()."
            )
        with DeferredSignals():  # the step is queued as a whole
            return super().step(*args, **kwargs)

    def _init_kvstore(self):
        trainers.update_owners(self)
        with trainers.without_kvstore(self), changing_owners([]):
            super()._init_kvstore()

    def _init_params(self):
        # MXNet queues copies of the parameters here. If pending work has failed, it
        # would copy uninitialized memory, so waitall raises the error first.
        if trainers.not_copied_yet(self):
            _warn_of_unconnected_layers(self)
            mx.nd.waitall()
        with _queued_as_a_whole(self):
            super()._init_params()
        if trainers.workers_of(self) > 1:
            # MXNet may send the first gradients before these copies are complete. Then
            # the kvstore's servers would return sums of gradients as parameters.
            mx.nd.waitall()

    def _allreduce_grads(self):
        # If the kvstore updates, this reduction also updates the parameters. Otherwise
        # it may overlap with backward.
        if trainers.updates_on_kvstore(self):
            _await_gradients(self)
        with _queued_as_a_whole(self) as parallel:
            trainers.sum_gradients(parallel)
            super()._allreduce_grads()

    def _update(self, *args, **kwargs):
        if not trainers.updates_on_kvstore(self):  # else the reduction did the update
            _await_gradients(self)
        # An optimizer that draws random numbers would update each device differently.
        with _queued_as_a_whole(self) as parallel:
            super()._update(*args, **kwargs)
            trainers.mark_used(parallel)


@contextmanager
def _queued_as_a_whole(trainer):
    """Defer signals while a trainer changes owners; yield its parallel parameters."""
    parallel = trainers.parallel_parameters(trainer)
    with DeferredSignals(), changing_owners(parallel):
        yield parallel


def _await_gradients(trainer):
    """Wait for the gradients; raise an error of a gradient or of a layer.

    If the program reads its loss, MXNet raises the layer's error and forgets it. Then
    it computes gradients from memory that was never written, without another error.
    """
    for gradient in trainers.gradients_of(trainer):
        gradient.wait_to_read()
    raise_pending()


def _warn_of_unconnected_layers(trainer):
    """Warn if processes sum gradients with a kvstore, but normalize alone."""
    workers = trainers.workers_of(trainer)
    alone = [layer.name for layer in _layers_of(trainer) if layer.lacks_processes()]
    if workers > 1 and alone:
        warn(
            f"the trainer's kvstore has {workers} workers, but SyncBatchNorm "
            f"'{alone[0]}' is not connected with other processes, so each worker "
            "normalizes its own shard only. Start the workers with mpirun, and call "
            "gluon_syncbn.distributed.init() first, see docs/guides/kvstore.md."
        )


def _living_layers():
    # The values could not be listed while another thread adds one.
    return [layer for reference in layers.valuerefs() if (layer := reference())]


def _layers_of(trainer):
    own = set(map(id, trainers.parameters_of(trainer)))
    return [x for x in _living_layers() if own & set(map(id, x.parameters))]
