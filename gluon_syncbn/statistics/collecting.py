"""The moments of batches that native code collects in a net's layers.

Every BatchNorm synchronizes meanwhile. While a layer collects, it takes each batch's
statistics in inference, too, and leaves its running statistics alone: so nothing else
in a net has to change. It must not know how a net is driven.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.gluon import SymbolBlock

from ..common.moments import Moments
from ..layer.convert import convert_sync_batchnorm
from ..layer.finding import unsynchronized_layers
from ..layer.symbol_blocks import check_symbol_block, convert_graph
from ..mxnet_private.blocks import blocks_of, forget_graph
from ..native.library import load
from ..native.program import warn


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
            check_symbol_block(block)
            if unsynchronized_layers(block):
                saved.append((block, type(block), dict(vars(block))))
                if isinstance(block, SymbolBlock):
                    # The graph as it is now, of which a part may synchronize already.
                    vars(block).pop("_source", None)
                    left += convert_graph(block, {})
                else:
                    convert_sync_batchnorm(block)
        if left:
            warn(
                f"{', '.join(left)} keep their statistics, because their mean or "
                "variance is read"
            )
        if saved:
            net.apply(forget_graph)
        yield
    finally:
        for block, cls, attributes in saved:
            block.__class__ = cls
            vars(block).clear()
            vars(block).update(attributes)
        if saved:
            net.apply(forget_graph)


class Collected(NamedTuple):
    """The moments of a layer; see src/op/collected_moments.h."""

    batches: int
    is_unbiased: bool
    total: Moments

    def merge(self, other: Collected) -> Collected:
        """The moments of the batches of both."""
        return Collected(
            self.batches + other.batches,
            self.is_unbiased,
            self.total.merge(other.total),
        )

    def variance(self) -> np.ndarray:
        """The running variance."""
        # m2 is 0 where the divisor would be 0.
        return self.total.m2 / max(1, self.total.count - self.is_unbiased)


@contextmanager
def collecting(keys: Iterable[str]) -> Iterator[None]:
    """In the ``with`` block the layers of these keys collect moments."""
    mx.nd.waitall()  # calls that are queued already would be taken for batches
    try:
        for key in keys:
            load().gluon_syncbn_collect(key, True)
        yield
    finally:
        for key in keys:
            load().gluon_syncbn_collect(key, False)


def read_collected(key: str) -> Collected | None:
    """The moments that a layer has collected; None if it has had no batch."""
    size = load().gluon_syncbn_collected(key, None, 0)
    if size == 0:
        return None
    numbers = np.empty(size)
    load().gluon_syncbn_collected(key, numbers.ctypes.data, size)
    batches, count, is_unbiased = numbers[:3]
    mean, m2, _ = numbers[3:].reshape(3, -1)
    return Collected(int(batches), bool(is_unbiased), Moments(count, mean, m2))
