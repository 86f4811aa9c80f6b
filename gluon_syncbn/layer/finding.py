"""Find the batch normalizations of a net: blocks, and nodes of SymbolBlocks."""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import SymbolBlock

from ..mxnet_private.blocks import BatchNormBase, name_of_parameter, names_in
from .batch_norm import SyncBatchNorm
from .norm_kinds import Norm, own_methods
from .symbol_blocks import norms_in


def norms_of(net: mx.gluon.Block) -> list[Norm]:
    """Return the batch normalizations of a net, including `net` itself."""
    found, names = [], names_in(net)
    for block, name in names.items():
        if isinstance(block, SymbolBlock):
            found += norms_in(block)
        elif isinstance(block, BatchNormBase):
            methods = ", ".join(own_methods(block))
            is_plain = not methods or isinstance(block, SyncBatchNorm)
            reason = "" if is_plain else f"{type(block).__name__} defines {methods}"
            found.append(Norm(name, block, reason))
    known = {norm.layer.running_mean for norm in found}
    reason = "a block calls F.BatchNorm, or a layer that is not its child"
    return found + [
        Norm(name_of_parameter(name, place), None, reason)
        for block, place in names.items()
        for name, parameter in block.params.items()
        if name.endswith(("running_mean", "moving_mean")) and parameter not in known
    ]


def synchronized_layers(net: mx.gluon.Block) -> list:
    return [n.layer for n in norms_of(net) if isinstance(n.layer, SyncBatchNorm)]


def unsynchronized_layers(net: mx.gluon.Block) -> list[str]:
    """Return the names of norms that are neither frozen nor our SyncBatchNorm."""
    norms = [norm for norm in norms_of(net) if not norm.is_frozen()]
    return [n.name for n in norms if not isinstance(n.layer, SyncBatchNorm)]
