"""The replicas of a parallel net's parameters: which of them counts, and when.

A program for one device has one array of a parameter and one of its gradient. On
several devices it gets the replica on its current context, changes that one, and
expects that the change counts.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from ..devices.devices import inside_map
from ..mxnet_private.parameters import (
    data_of,
    is_deferred,
    is_dense,
    is_parallel,
    save_value_of,
    set_summed,
    unset_parallel,
    when_initialized,
)
from ..native import steps


def adopt(parameter: mx.gluon.Parameter, context: mx.Context) -> None:
    """Make a parameter one of a parallel net, whose first device is on `context`."""
    save_value_of(parameter, context)
    if not is_parallel(parameter) and is_dense(parameter):
        set_summed(parameter, False)
        steps.guard_trainers([parameter])
        parameter.data = _LentData(parameter)


def release(parameter: mx.gluon.Parameter) -> None:
    """Undo `adopt`."""
    save_value_of(parameter, None)
    unset_parallel(parameter)
    vars(parameter).pop("data", None)
    steps.release_trainers([parameter])


def note_parts(parameters: Sequence) -> None:
    """Note that the next gradients are one device's parts, which a Trainer sums."""
    for parameter in parameters:
        if is_parallel(parameter):
            set_summed(parameter, False)


def update(parameters: Sequence, contexts: Sequence[mx.Context]) -> None:
    """Copy arrays that the program got, and may have written to, to other devices."""
    replaced = [vars(p)["data"] for p in parameters if "data" in vars(p)]
    lent = [data for data in replaced if data.lent]
    if len(contexts) < 2 or not lent:
        return
    # A prediction re-lays weights in place by work that no copy waits for.
    mx.nd.waitall()
    with autograd.pause():
        for data in lent:
            data.send()


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


class _LentData:
    """Takes the place of a parameter's method `data`, and notes what it returns."""

    def __init__(self, parameter: mx.gluon.Parameter) -> None:
        self._parameter = parameter
        self.lent: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> mx.nd.NDArray:
        array = type(self._parameter).data(self._parameter, *args, **kwargs)
        if not inside_map():
            self.lent = array.context
        return array

    def send(self) -> None:
        """Copy the array that was returned to the other devices."""
        arrays = {data.context: data for data in data_of(self._parameter)}
        source = arrays.pop(self.lent)
        for data in arrays.values():
            source.copyto(data)
        # References: the parameter's, and two here. A program may have kept another.
        if sys.getrefcount(source) <= 3:
            self.lent = None
