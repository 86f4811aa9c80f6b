"""A parallel net warns its caller of mistakes that raise no error.

It must not know how a net is driven.
"""

from __future__ import annotations

import weakref
from typing import Sequence

import mxnet as mx

from ..common.arguments import comma_list, pluralize
from ..layer.finding import own_operators, unsynchronized_layers
from ..mxnet_private import trainers
from ..mxnet_private.blocks import blocks_of, has_graph
from ..mxnet_private.parameters import contexts_of, trainer_of
from ..native.program import warn

_warned_of = weakref.WeakSet()  # trainers and nets
_examined = weakref.WeakSet()  # nets


def of_trainer(parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Warns once of a trainer that lets the copies of a parameter drift apart."""
    trainer = trainer_of(parameters)
    if trainer is None or trainer in _warned_of:
        return
    contexts = contexts_of(parameters[0])
    if set(trainers.contexts_of(trainer)) != set(contexts):
        fault = (
            f"was made for {comma_list(trainers.contexts_of(trainer))}, but the net is "
            f"on {comma_list(contexts)}, so its copies drift apart; make the trainer "
            "after make_parallel(..., reset_ctx=True)"
        )
    else:
        return
    _warned_of.add(trainer)
    message = f"the trainer of this net {fault}. check_replicas(net) tells"
    warn(message)


def of_few_rows(net: mx.gluon.Block, rows: Sequence[int]) -> None:
    """Warns once of batch normalization whose batches are a row or two."""
    if max(rows) > 2 or net in _warned_of:
        return
    _warned_of.add(net)
    found = sum(map(unsynchronized_layers, blocks_of(net)), [])
    if found:
        warn(
            f"{found[0]} normalizes each device's {pluralize(max(rows), 'row')} alone, "
            "as sync_bn=False was set: running statistics of so few are poor, expected "
            "sync_bn=True or more rows"
        )


def of_operators(net: mx.gluon.Block) -> None:
    """Warns of what :func:`convert_sync_batchnorm` could not know of before a call."""
    if net in _examined or not any(map(has_graph, blocks_of(net))):
        return
    _examined.add(net)
    names = own_operators(net)
    if names:
        warn(
            f"these batch normalizations stay unsynchronized: {comma_list(names)} (a "
            "block calls F.BatchNorm; only layers, such as "
            "gluon_syncbn.SyncBatchNorm, synchronize)"
        )
