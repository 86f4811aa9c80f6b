"""Finds the batch normalizations of a net that do not synchronize.

Called by ``parallel/net.py`` for its warnings. Conversion changes layers and
SymbolBlocks; what blocks compute by F.BatchNorm shows in the graph of a trace only.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import HybridBlock, SymbolBlock

from ..mxnet_private.blocks import BatchNormBase, has_graph, settings_of, symbol_of
from . import rewriting
from .batch_norm import SyncBatchNorm
from .symbol_blocks import OPERATORS, is_frozen


def unsynchronized_layers(net: mx.gluon.Block) -> list[str]:
    """The names of MXNet's own batch normalizations that train their statistics."""
    found = []

    def collect(block):
        if isinstance(block, SymbolBlock):
            nodes = [node for node, _ in rewriting.nodes_of(symbol_of(block))]
            found.extend(node["name"] for node in nodes if _trains(node))
        elif isinstance(block, BatchNormBase) and not isinstance(block, SyncBatchNorm):
            if not settings_of(block)["use_global_stats"]:
                found.append(block.name)

    net.apply(collect)
    return found


def own_operators(net: mx.gluon.Block) -> list[str]:
    """The names of batch normalizations in traced graphs that conversion cannot reach.

    Those with fixed statistics are left out: they need no other device.
    """
    found, known = set(), []

    def collect(block):
        if isinstance(block, BatchNormBase):
            known.append(block.prefix or "fwd")
        elif isinstance(block, HybridBlock) and has_graph(block):
            nodes = [node for node, _ in rewriting.nodes_of(symbol_of(block))]
            names = [node["name"] for node in nodes if _trains(node)]
            (known.extend if isinstance(block, SymbolBlock) else found.update)(names)

    net.apply(collect)
    return sorted(name for name in found if not name.startswith(tuple(known)))


def _trains(node):
    return node["op"] in OPERATORS and not is_frozen(node)
