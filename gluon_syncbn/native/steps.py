"""Whole steps: a step of a gluon.Trainer changes everything that it should, or nothing.

Called by MXNet's Trainer, whose methods are wrapped here, and by ``failures.py``. It
must not know how gradients are computed. docs/design/steps.md says how MXNet decides
whether a step is whole; what a dropped one has changed before, `roll_back` undoes.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from contextlib import contextmanager
from itertools import zip_longest
from typing import Iterator

import mxnet as mx
import numpy as np

from ..common.nested import arrays_in
from ..mxnet_private import trainers
from ..mxnet_private.library import push
from ..mxnet_private.parameters import data_of, trainer_of
from .interrupts import deferred_interrupt
from .library import load

_WHOLE = 1  # Verdict in src/mxnet/commit.h
# All that MXNet's optimizers keep in Python and change in an update.
_COUNTS = "num_update", "m_schedule", "lbmult"
_STATISTICS = "running_mean", "running_var"

# With `name`, `parameters` by name, `key` and `is_alone()`.
layers = weakref.WeakSet()
_pending: list = []  # steps that are not known to be whole, oldest first
_pending_changes = threading.Lock()
_errors_seen = weakref.WeakKeyDictionary()  # by trainer


class _Step:
    """One step of a trainer, and what the trainer was like before it."""

    def __init__(self, trainer):
        self.trainer = weakref.ref(trainer)
        self.thread = threading.get_ident()
        # The library writes both; errors are counted from step to step of a trainer.
        self.verdict = ctypes.c_int()
        self.errors_seen = _errors_seen.setdefault(trainer, ctypes.c_int64())
        self.token = mx.nd.empty((1,), ctx=mx.cpu())
        optimizer = trainer.optimizer
        counts, scheduler = trainers.update_counts(optimizer), optimizer.lr_scheduler
        changing = [counts, *counts.values()]
        if scheduler is not None:
            changing.append(vars(scheduler))
        self._saved = [(values, dict(values)) for values in changing]
        self._values = {n: vars(optimizer)[n] for n in _COUNTS if n in vars(optimizer)}

    def restore_optimizer(self):
        trainer = self.trainer()
        if trainer is not None:
            for values, former in self._saved:
                values.clear()
                values.update(former)
            vars(trainer.optimizer).update(self._values)


def _forget_past():
    """Forgets steps that are whole, and the steps of their trainers before them."""
    whole, left = set(), []  # trainers, for which their errors_seen stand
    for step in reversed(_pending):
        if step.verdict.value == _WHOLE:
            whole.add(id(step.errors_seen))
        if id(step.errors_seen) not in whole:
            left.append(step)
    _pending[:] = reversed(left)


class _Arguments(ctypes.Structure):
    """As gluon_syncbn_step in src/c_api/python_api.cc."""

    _fields_ = [
        ("gradients", ctypes.POINTER(ctypes.c_void_p)),
        ("sizes", ctypes.POINTER(ctypes.c_int)),
        ("num_lists", ctypes.c_int),
        ("running_statistics", ctypes.POINTER(ctypes.c_void_p)),
        ("num_running_statistics", ctypes.c_int),
        ("keys", ctypes.POINTER(ctypes.c_char_p)),
        ("num_keys", ctypes.c_int),
        ("token", ctypes.c_void_p),
        ("errors_seen", ctypes.POINTER(ctypes.c_int64)),
        ("verdict", ctypes.POINTER(ctypes.c_int)),
    ]


@contextmanager
def _whole(trainer: mx.gluon.Trainer) -> Iterator[None]:
    """In the block the update of the step under way is queued, as a whole.

    Its gradients are queued before. Nothing waits, so Ctrl-C can.
    """
    with deferred_interrupt(all_of_them=True):
        if not load().gluon_syncbn_has_operators():
            yield
            return
        _warn_of_single_value()
        if trainer not in _errors_seen:  # its first step
            _warn_of_shards(trainer)
        parameters = [
            p for p in trainers.parameters_of(trainer) if p.grad_req != "null"
        ]
        gradients = list(zip(*(p.list_grad() for p in parameters)))  # by device
        step = _Step(trainer)
        with _pending_changes:
            _forget_past()
            _pending.append(step)
        commit = _commit(step, gradients)
        try:
            yield
        finally:
            weights = zip(*map(data_of, parameters))
            states = trainers.states_of(trainer)
            written = list(map(arrays_in, zip_longest(gradients, weights, states)))
            load().gluon_syncbn_seal_step(commit, *_as_c(written))


def _guard(updater, index, gradient, weight):
    """Puts the error of a dropped step into all that the update will write.

    Gradients carry it. But an update has operations that read none, as weight decay.
    They would run, or be skipped with a failed operation's error, which temporary space
    passes on, and which the program clears when it reads its loss.
    """
    if load().gluon_syncbn_has_operators():
        indices = index if isinstance(index, (list, tuple)) else [index]
        states = [updater.states.get(i) for i in indices]
        read, written = arrays_in([gradient]), arrays_in([weight, states])
        push(load().gluon_syncbn_do_nothing, 0, read[0].context, read, written)


def _warn_of_single_value():
    layer = load().gluon_syncbn_single_value()
    if layer:
        warnings.warn(
            f"SyncBatchNorm '{layer}' trained on one value per channel over all "
            "devices: its output is beta, whatever the input, expected at least two",
            stacklevel=6,
        )


def _warn_of_shards(trainer):
    """A kvstore connects the workers' gradients, but not their layers."""
    workers = trainers.workers_of(trainer)
    alone = [layer.name for layer in _layers_of(trainer) if layer.is_alone()]
    if workers > 1 and alone:
        warnings.warn(
            f"the trainer's kvstore has {workers} workers, but SyncBatchNorm "
            f"'{alone[0]}' is connected with no other process, so each worker "
            "normalizes over its own shard only: start the workers with mpirun, and "
            "call gluon_syncbn.distributed.init() first, see "
            "docs/guides/processes.md#gradients-over-mxnets-kvstore",
            stacklevel=10 if trainers.updates_on_kvstore(trainer) else 7,
        )


def _layers_of(trainer):
    return [layer for layer in list(layers) if _trainer_of(layer) is trainer]


def _commit(step, gradients):
    own = _layers_of(step.trainer())
    statistics = [
        array for layer in own for pair in _statistics(layer) for array in pair
    ]
    keys = [layer.key.encode() for layer in own]
    arguments = _Arguments(
        *_as_c(gradients),
        _as_c([statistics])[0],
        len(statistics),
        (ctypes.c_char_p * len(keys))(*keys),
        len(keys),
        step.token.handle,
        ctypes.pointer(step.errors_seen),
        ctypes.pointer(step.verdict),
    )
    commit = load().gluon_syncbn_commit_step(ctypes.byref(arguments))
    if commit is None:
        raise mx.MXNetError(load().gluon_syncbn_last_error())
    return commit


def _as_c(lists):
    """Handles of all arrays, the lists' lengths, and their number, as C takes them."""
    handles = [array.handle for arrays in lists for array in arrays]
    sizes = (ctypes.c_int * len(lists))(*map(len, lists))
    return (ctypes.c_void_p * len(handles))(*handles), sizes, len(lists)


def _statistics(layer):
    """For each device the running mean and variance, as far as initialized."""
    return list(zip(*(data_of(layer.parameters[name]) for name in _STATISTICS)))


def _trainer_of(layer):
    return trainer_of(layer.parameters.values())


def wait() -> None:
    """Waits until the steps of this thread are decided; they may have failed."""
    for step in [s for s in _pending if s.thread == threading.get_ident()]:
        try:
            step.token.wait_to_read()
        except mx.MXNetError:
            pass  # recover() undoes it


def roll_back(has_failed: bool) -> int:
    """Undoes what steps that were dropped, or not finished, have changed.

    Call it while MXNet is idle. Returns the number of dropped steps. Warns of
    layers whose step cannot be undone.
    """
    with _pending_changes:
        dropped = [step for step in _pending if step.verdict.value != _WHOLE]
        _pending.clear()
    for step in reversed(dropped):  # the oldest one last
        step.restore_optimizer()
    unknown = []
    for layer in list(layers):
        if not load().gluon_syncbn_has_open_step(layer.key):
            continue
        if _trainer_of(layer) is not None:
            _undo_statistics(layer)
        elif has_failed:
            unknown.append(layer.name)
        load().gluon_syncbn_end_step(layer.key)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        warnings.warn(
            f"SyncBatchNorm '{unknown[0]}'{more} ran in a step that failed, and no "
            "gluon.Trainer updates their parameters, so it is not known where the step "
            "began: running statistics and parameters may hold a part of it; load the "
            "last checkpoint",
            stacklevel=4,
        )
    return len(dropped)


def _undo_statistics(layer):
    for arrays in _statistics(layer):
        context = arrays[0].context
        values = [array.asnumpy().astype(np.float64) for array in arrays]
        addresses = [value.ctypes.data for value in values]
        if load().gluon_syncbn_undo_statistics(
            layer.key, str(context), *addresses, values[0].size
        ):
            with mx.autograd.pause():
                for array, value in zip(arrays, values):
                    array[:] = mx.nd.array(value, context, array.dtype)


@contextmanager
def _initialized(trainer):
    """In the block a trainer copies parameters for the first time.

    The copies are made in the queue of the first step, so if that fails they could be
    of uninitialized memory.
    """
    if trainers.not_copied_yet(trainer) and load().gluon_syncbn_has_operators():
        mx.nd.waitall()
    with deferred_interrupt(all_of_them=True):  # a key can be initialized once
        yield
    if trainers.workers_of(trainer) > 1:
        # MXNet does not order the copies before the first gradients: servers that have
        # added these up would send them as the parameters.
        mx.nd.waitall()


def _uninterrupted(_trainer):
    """With a kvstore MXNet 1.6 updates in the reduction, and copies in the update."""
    return deferred_interrupt(all_of_them=True)


trainers.wrap(_uninterrupted, _initialized, _whole, _guard)
