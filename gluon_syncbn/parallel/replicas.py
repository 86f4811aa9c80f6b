"""The replicas of a parallel net's parameters and running statistics.

A program for one device has one array of a parameter and one of its gradient. On
several devices it gets the replica on its current context, changes that replica, and
expects all devices to use the change.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private.parameters import (
    data_of,
    is_deferred,
    is_dense,
    is_parallel,
    keep_data,
    lend_data,
    save_value_of,
    set_summed,
    unset_parallel,
    when_initialized,
)
from ..native import failures, steps
from ..native.interrupts import ALL_WAIT, DeferredSignals
from ..native.library import load


def adopt(parameter: mx.gluon.Parameter, context: mx.Context) -> None:
    """Make a parameter belong to a parallel net, whose first device is `context`."""
    save_value_of(parameter, context)
    if not is_parallel(parameter) and is_dense(parameter):
        set_summed([parameter], False)
        steps.guard_trainers([parameter])
        lend_data(parameter, failures.here)


def release(parameter: mx.gluon.Parameter) -> None:
    """Undo `adopt`."""
    save_value_of(parameter, None)
    unset_parallel(parameter)
    keep_data(parameter)
    steps.release_trainers([parameter])


def mark_not_summed(parameters: Sequence) -> None:
    """Record that each device's next gradients are a part, for a Trainer to sum."""
    set_summed(filter(is_parallel, parameters), False)


@contextmanager
def unchanged(parameters: Sequence) -> Iterator[None]:
    """Restore arrays without a gradient (running statistics) after the block."""
    saved = []

    def save(parameter):
        saved.extend((data, data.copy()) for data in data_of(parameter))

    for parameter in parameters:
        if parameter.grad_req == "null":
            save(parameter)
            if is_deferred(parameter):
                when_initialized(parameter, partial(save, parameter))
    try:
        yield
    finally:
        with autograd.pause():
            for data, value in saved:
                value.copyto(data)


@contextmanager
def restricted(
    layers: Sequence, contexts: Sequence[mx.Context], copies_statistics: bool = False
) -> Iterator[None]:
    """Make SyncBatchNorm layers wait only for these contexts in training.

    A batch may have fewer rows than there are contexts. With `copies_statistics` the
    other contexts then get the running statistics of the first one. Backward may run
    after the block, because it waits for the contexts of its forward call.

    The block waits for pending work before and after, because forward calls are
    numbered when they run, not when they are queued.
    """
    # A handler could raise between two layers, or before the first line of __exit__. So
    # the first Ctrl-C waits for the end of the block; a second one interrupts it.
    with DeferredSignals() as section:
        try:
            mx.nd.waitall()
            for layer in layers:
                _set_participants(layer, contexts)
            section.limits = 1, math.inf
            yield
        finally:
            section.limits = ALL_WAIT
            try:
                mx.nd.waitall()
            finally:
                # Also after a failure: other layers may have finished their step.
                for layer in layers:
                    _set_participants(layer, [])
                for layer in layers if copies_statistics else ():
                    _copy_running_statistics(layer, contexts)


def _set_participants(layer, contexts):
    load().gluon_syncbn_set_participants(layer.key, " ".join(map(str, contexts)))


def _copy_running_statistics(layer, contexts):
    """Copy the first context's running statistics to all but `contexts`."""
    for parameter in (layer.running_mean, layer.running_var):
        for data in data_of(parameter):  # empty if the shape is not known yet
            if data.context not in contexts:
                with autograd.pause():
                    parameter.data(contexts[0]).copyto(data)
