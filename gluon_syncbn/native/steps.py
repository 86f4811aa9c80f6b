"""Whole steps: a step of a gluon.Trainer changes everything that it should, or nothing.

Called by MXNet's Trainer, whose methods are wrapped here, and by ``failures.py``. It
must not know how gradients are computed.

Between the gradients of a step and their use the library queues operations
(src/mxnet/commit.cc) that decide whether the step is whole: no layer has failed, and
no gradient carries an error. Otherwise MXNet skips the update of every parameter. What
a dropped step has changed before, `roll_back` undoes: running statistics, which are
updated in forward, and the update counts of the optimizer, which live in Python.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from functools import wraps
from typing import Any, Iterable

import mxnet as mx
import numpy as np

from .interrupts import deferred_interrupt
from .library import load

_WHOLE = 1  # Verdict in src/mxnet/commit.h
# All that MXNet's optimizers keep in Python and change in an update.
_COUNTS = "num_update", "m_schedule", "lbmult"

layers = weakref.WeakSet()  # objects with `key`, `name` and `parameters`, by name
_pending: list = []  # steps that are not known to be whole, oldest first


class _Step:
    """One step of a trainer, and what the trainer was like before it."""

    def __init__(self, trainer):
        self.trainer = weakref.ref(trainer)
        self.thread = threading.get_ident()
        self.verdict = ctypes.c_int()  # the library writes it
        self.token = mx.nd.empty((1,), ctx=mx.cpu())
        optimizer = trainer._optimizer
        self._counts = {n: c.copy() for n, c in _update_counts(optimizer).items()}
        self._values = {n: vars(optimizer)[n] for n in _COUNTS if n in vars(optimizer)}
        scheduler = optimizer.lr_scheduler
        self._schedule = None if scheduler is None else dict(vars(scheduler))

    def restore_optimizer(self):
        trainer = self.trainer()
        if trainer is None:
            return
        optimizer = trainer._optimizer
        for device, counts in _update_counts(optimizer).items():
            counts.clear()
            counts.update(self._counts.get(device, {}))
        vars(optimizer).update(self._values)
        if self._schedule is not None:
            vars(optimizer.lr_scheduler).update(self._schedule)


def _update_counts(optimizer):
    return optimizer._all_index_update_counts


def commit(trainer: mx.gluon.Trainer) -> None:
    """Queues the operations that decide about the step under way.

    To be called once its gradients are queued, before anything that uses them to change
    a parameter. It waits for nothing.
    """
    while _pending and _pending[0].verdict.value == _WHOLE:
        del _pending[0]
    gradients = [p.list_grad() for p in trainer._params if p.grad_req != "null"]
    if not gradients or not load().gluon_syncbn_has_operators():
        return
    step = _Step(trainer)
    own = [layer for layer in list(layers) if _trainer_of(layer) is trainer]
    statistics = [array for layer in own for array in _statistics(layer)]
    _pending.append(step)
    load().gluon_syncbn_commit_step(
        _handles(array for arrays in gradients for array in arrays),
        (ctypes.c_int * len(gradients))(*map(len, gradients)),
        len(gradients),
        _handles(statistics),
        len(statistics),
        (ctypes.c_char_p * len(own))(*(layer.key.encode() for layer in own)),
        len(own),
        step.token.handle,
        ctypes.byref(step.verdict),
    )


def _handles(arrays: Iterable) -> Any:
    handles = [array.handle for array in arrays]
    return (ctypes.c_void_p * len(handles))(*handles)


def _statistics(layer):
    """The running statistics of a layer on all devices, as far as initialized."""
    names = "running_mean", "running_var"
    return [array for n in names for array in layer.parameters[n]._data or ()]


def _trainer_of(layer):
    """The trainer of any of a layer's parameters; None without one."""
    trainers = (p._trainer for p in layer.parameters.values())
    return next((t for t in trainers if isinstance(t, mx.gluon.Trainer)), None)


def wait() -> None:
    """Waits until the steps of this thread are decided; they may have failed."""
    own = [step for step in _pending if step.thread == threading.get_ident()]
    for step in own:
        try:
            step.token.wait_to_read()
        except mx.MXNetError:
            pass  # recover() undoes it


def roll_back(has_failed: bool) -> int:
    """Undoes what steps that were dropped, or not finished, have changed.

    To be called while MXNet is idle. Returns the number of dropped steps. Warns of
    layers whose step cannot be undone.
    """
    dropped = [step for step in _pending if step.verdict.value != _WHOLE]
    _pending.clear()
    for step in reversed(dropped):  # the oldest one last
        step.restore_optimizer()
    unknown = []
    for layer in list(layers):
        if load().gluon_syncbn_has_open_step(layer.key.encode()):
            is_undone = _trainer_of(layer) is not None
            if is_undone:
                _undo_statistics(layer)
            elif has_failed:
                unknown.append(layer.name)
            load().gluon_syncbn_end_step(layer.key.encode(), is_undone)
    if unknown:
        more = f" and {len(unknown) - 1} more layers" if len(unknown) > 1 else ""
        warnings.warn(
            f"SyncBatchNorm '{unknown[0]}'{more} ran in a step that failed, and no "
            "gluon.Trainer updates their parameters, so it is not known where the step "
            "began: running statistics and parameters may hold a part of it; load the "
            "last checkpoint",
            stacklevel=3,
        )
    return len(dropped)


def _undo_statistics(layer):
    mean, var = (layer.parameters[n]._data for n in ("running_mean", "running_var"))
    for arrays in zip(mean or (), var or ()):
        values = [array.asnumpy().astype(np.float64) for array in arrays]
        pointers = [v.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for v in values]
        device = str(arrays[0].context).encode()
        if load().gluon_syncbn_undo_statistics(
            layer.key.encode(), device, *pointers, values[0].size
        ):
            with mx.autograd.pause():
                for array, value in zip(arrays, values):
                    array[:] = mx.nd.array(value, array.context, array.dtype)


def _prepare(trainer):
    """Waits before a trainer copies parameters for the first time.

    The copies are made in the queue of the first step, so if that fails they could be
    of memory that nobody has written. Also, MXNet declares running statistics of
    static_shape graphs as only read (imperative_utils.h, CreateEngineOp), so a copy
    would not wait for the first forward to write them.
    """
    ready = [p for p in trainer._params_to_init if not p._deferred_init]
    if ready and load().gluon_syncbn_has_operators():
        mx.nd.waitall()
        load().gluon_syncbn_reserve_errors(256 + 2 * len(trainer._params))


def _wrap_trainer():
    kind = mx.gluon.Trainer
    initialize, reduce, update = kind._init_params, kind._allreduce_grads, kind._update

    @wraps(initialize)
    def _init_params(self):
        _prepare(self)
        initialize(self)

    @wraps(reduce)
    def _allreduce_grads(self):
        if not self._update_on_kvstore:
            return reduce(self)
        with deferred_interrupt():  # it updates, one parameter after the other
            commit(self)
            reduce(self)

    @wraps(update)
    def _update(self, *args, **kwargs):
        if self._update_on_kvstore:
            return update(self, *args, **kwargs)
        with deferred_interrupt():
            commit(self)
            update(self, *args, **kwargs)

    for method in (_init_params, _allreduce_grads, _update):
        setattr(kind, method.__name__, method)


_wrap_trainer()
