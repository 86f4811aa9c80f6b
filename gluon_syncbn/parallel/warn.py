"""A parallel net warns its caller of mistakes that raise no error.

It must not know how a net is driven.
"""

from __future__ import annotations

import weakref
from typing import Iterable, Sequence

import mxnet as mx

from ..arguments import comma_list, pluralize
from ..layer.finding import dividing_operators, unsynchronized_layers
from ..native.program import warn

_warned_of = weakref.WeakSet()  # nets
_examined = weakref.WeakSet()  # nets


def of_few_rows(net: mx.gluon.Block, rows: Sequence[int]) -> None:
    """Warns once of batch normalization whose batches are a row or two."""
    if max(rows) > 2 or net in _warned_of:
        return
    _warned_of.add(net)
    found = unsynchronized_layers(net)
    if found:
        warn(
            f"{found[0]} normalizes each device's {pluralize(max(rows), 'row')} alone, "
            "as sync_bn=False was set: running statistics of so few are poor, expected "
            "sync_bn=True or more rows"
        )


def of_operators(net: mx.gluon.Block, outputs: Iterable) -> None:
    """Warn once of operators whose gradient depends on the number of devices.

    `outputs` are those of one device in a recorded call.
    """
    if net in _examined:
        return
    _examined.add(net)
    names = dividing_operators(net, outputs)
    if names:
        warn(
            f"the gradients of {comma_list(names)} are divided by the rows of each "
            "device and not of the batch, so their sum is too large. Set "
            "normalization='null', and divide by the rows of the batch in the loss or "
            "in trainer.step(rows)."
        )
