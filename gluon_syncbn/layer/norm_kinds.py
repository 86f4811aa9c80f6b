"""The kinds of batch normalization in a net, and which of them can be converted."""

from __future__ import annotations

from typing import Any, NamedTuple

import mxnet as mx
from mxnet.gluon import nn

from ..mxnet_private.blocks import BatchNormBase, settings_of
from .batch_norm import ActivatedBatchNorm, SyncBatchNorm

# MXNet's own SyncBatchNorm, which MXNet 2 has in nn.
CONTRIB = getattr(nn, "SyncBatchNorm", None) or mx.gluon.contrib.nn.SyncBatchNorm
RELU = getattr(nn, "BatchNormReLU", nn.BatchNorm)  # new in MXNet 1.8
_KNOWN = SyncBatchNorm, ActivatedBatchNorm, CONTRIB, RELU, nn.BatchNorm, BatchNormBase
FROZEN = "use_global_stats"


class Norm(NamedTuple):
    """A batch normalization of a net."""

    name: str
    layer: Any  # None if only its running mean was found, as a parameter of a block
    reason: str = ""  # why it cannot be converted
    block: Any = None  # the SymbolBlock whose graph has the layer
    is_masked: bool = False  # the graph calls the layer with a mask

    def is_frozen(self) -> bool:
        return self.layer is not None and bool(settings_of(self.layer)[FROZEN])

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def own_methods(block: mx.gluon.Block) -> list[str]:
    """Return the names of methods of a layer that conversion would lose."""
    cls = type(block)
    known = next(base for base in cls.__mro__ if base in _KNOWN).__mro__
    own = {name for base in cls.__mro__ if base not in known for name in vars(base)}
    for name in {"forward", "hybrid_forward"} & vars(block).keys():
        # A `forward` that this package stores in a block calls the class's `forward`.
        if not getattr(vars(block)[name], "calls_class", False):
            own.add(name)
    if cls.__name__ == "BatchNormCudnnOff":  # GluonCV's class differs on cuDNN only
        own.discard("hybrid_forward")
    return sorted(n for n in own if n == "__call__" or not n.startswith("__"))
