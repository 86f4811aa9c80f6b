"""Finds batch normalizations that blocks compute themselves, by F.BatchNorm.

Called by ``parallel/net.py``. Conversion changes layers and SymbolBlocks; what is
neither shows in the graph of a trace only.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import HybridBlock, SymbolBlock

from ..mxnet_private.blocks import BatchNormBase, has_graph, symbol_of
from . import rewriting
from .symbol_blocks import OPERATORS, is_frozen


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
            names = [
                node["name"]
                for node in nodes
                if node["op"] in OPERATORS and not is_frozen(node)
            ]
            (known.extend if isinstance(block, SymbolBlock) else found.update)(names)

    net.apply(collect)
    return sorted(name for name in found if not name.startswith(tuple(known)))
