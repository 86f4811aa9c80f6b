"""The replicas of a parallel net's parameters: which of them counts, and when.

A program for one device has one array of a parameter and one of its gradient. On
several devices it gets the replica on its current context, changes that one, and
expects that the change counts.
"""

from __future__ import annotations

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


def adopt(parameter: mx.gluon.Parameter, context: mx.Context) -> None:
    """Make a parameter one of a parallel net, whose first device is on `context`."""
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


def note_parts(parameters: Sequence) -> None:
    """Note that the next gradients are one device's parts, which a Trainer sums."""
    set_summed(filter(is_parallel, parameters), False)


@contextmanager
def unchanged(parameters: Sequence) -> Iterator[None]:
    """Put arrays without a gradient back at the end, such as running statistics."""
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
