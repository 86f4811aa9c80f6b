"""A net whose BatchNorm layers synchronize for a while.

Called by ``statistics``. It must not know what is done with the net meanwhile.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Iterator

import mxnet as mx
from mxnet.gluon import SymbolBlock

from ..mxnet_private.blocks import blocks_of, forget_graph
from .convert import convert_sync_batchnorm
from .finding import unsynchronized_layers_of
from .symbol_blocks import convert_graph


@contextmanager
def synchronized(net: mx.gluon.Block) -> Iterator[None]:
    """In the ``with`` block every BatchNorm is a SyncBatchNorm over all its contexts.

    Layers that are one already, or frozen, do not change. Where others are converted,
    hybridized blocks trace their graphs again, here and afterwards.
    """
    saved: list = []
    left: list = []
    try:
        for block in blocks_of(net):
            if unsynchronized_layers_of(block):
                saved.append((block, type(block), dict(vars(block))))
                if isinstance(block, SymbolBlock):
                    # The graph as it is now, of which a part may synchronize already.
                    vars(block).pop("_source", None)
                    left += convert_graph(block, {})
                else:
                    convert_sync_batchnorm(block)
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
