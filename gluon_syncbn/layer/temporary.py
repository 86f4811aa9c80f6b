"""A net whose BatchNorm layers synchronize for a while.

Called by ``statistics``. It must not know what is done with the net meanwhile.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Iterator

import mxnet as mx
from mxnet.gluon import SymbolBlock

from ..mxnet_private.blocks import BatchNormBase, forget_graph, settings_of
from .batch_norm import SyncBatchNorm
from .convert import convert_sync_batchnorm
from .symbol_blocks import convert_graph, has_batch_norm


@contextmanager
def synchronized(net: mx.gluon.Block) -> Iterator[None]:
    """In the ``with`` block every BatchNorm is a SyncBatchNorm over all its contexts.

    Layers that are one already, or frozen, do not change. Where others are converted,
    hybridized blocks trace their graphs again, here and afterwards.
    """
    saved: list = []
    left: list = []

    def convert(block):
        former = block, type(block), dict(vars(block))
        if isinstance(block, SymbolBlock) and has_batch_norm(block):
            saved.append(former)
            # The graph as it is now, of which a part may synchronize already.
            vars(block).pop("_unconverted_graph", None)
            left.extend(convert_graph(block))
        elif isinstance(block, BatchNormBase) and not isinstance(block, SyncBatchNorm):
            if not settings_of(block)["use_global_stats"]:
                saved.append(former)
                convert_sync_batchnorm(block)

    try:
        net.apply(convert)
        if left:
            warnings.warn(
                f"{', '.join(left)} keep their statistics, because their mean or "
                "variance is read",
                stacklevel=4,
            )
        if saved:
            net.apply(forget_graph)
        yield
    finally:
        for block, kind, attributes in saved:
            block.__class__ = kind
            vars(block).clear()
            vars(block).update(attributes)
        if saved:
            net.apply(forget_graph)
