"""Finds the batch normalizations of a net: layers, and nodes of the graphs in it.

Most are blocks; those of a SymbolBlock are nodes of its graph, and what a block
computes by F.BatchNorm shows in the graph of a trace only. It must not know how layers
are converted.
"""

from __future__ import annotations

import weakref

import mxnet as mx
from mxnet.gluon import HybridBlock, SymbolBlock

from ..mxnet_private.blocks import (
    BatchNormBase,
    blocks_of,
    graph_of,
    has_graph,
    name_of,
    settings_of,
)
from ..mxnet_private.parameters import contexts_of
from ..native.library import load
from .batch_norm import SyncBatchNorm
from .rewriting import nodes_of
from .synchronization import ranks_of

OPERATORS = ("BatchNorm", "_contrib_BatchNormWithReLU", "_contrib_SyncBatchNorm")


def is_ours(node: dict) -> bool:
    """Tells whether a node is a layer of this package."""
    return node["op"] == "Custom" and node["attrs"]["op_type"] == "gluon_syncbn"


def is_frozen(node: dict) -> bool:
    """Tells whether a node normalizes with its running statistics in training too."""
    return node.get("attrs", {}).get("use_global_stats") in ("True", "1")


def synchronized_layers(net: mx.gluon.Block) -> list:
    """All SyncBatchNorm layers of a net, itself included, and all GraphLayers."""
    layers: list = []
    for block in blocks_of(net):
        if isinstance(block, SyncBatchNorm):
            layers.append(block)
        elif isinstance(block, SymbolBlock):
            nodes = nodes_of(graph_of(block))
            layers += [GraphLayer(block, *pair) for pair in nodes if is_ours(pair[0])]
    return layers


def running_statistics(net: mx.gluon.Block) -> list[tuple]:
    """The parameters (mean, variance) of every batch normalization, of any kind."""
    found = {}  # by identity, because layers may share them
    for block in blocks_of(net):
        if "running_mean" in vars(block):
            found[block.running_mean] = block.running_var
        elif isinstance(block, SymbolBlock):
            for node, inputs in nodes_of(graph_of(block)):
                if node["op"] in OPERATORS or is_ours(node):
                    mean, var = (block.params[name] for name in inputs[-2:])
                    found[mean] = var
    return list(found.items())


def unsynchronized_layers(block: mx.gluon.Block) -> list[str]:
    """The names of MXNet's own batch normalizations that train their statistics: those
    that a block itself is, or that its graph has if it is a SymbolBlock.
    """
    if isinstance(block, SymbolBlock):
        return list(_training_nodes(block).values())
    is_plain = isinstance(block, BatchNormBase) and not isinstance(block, SyncBatchNorm)
    if is_plain and not settings_of(block)["use_global_stats"]:
        return [name_of(block)]
    return []


def own_operators(net: mx.gluon.Block) -> list[str]:
    """The names of batch normalizations in traced graphs that conversion cannot reach.

    Those with fixed statistics are left out: they need no other device.
    """
    found: dict = {}  # nodes by the variables of their running statistics
    known = []
    for block in blocks_of(net):
        if isinstance(block, BatchNormBase):
            known.append((block.running_mean.var().name, block.running_var.var().name))
        elif isinstance(block, SymbolBlock):
            known += _training_nodes(block)
        elif isinstance(block, HybridBlock) and has_graph(block):
            found.update(_training_nodes(block))
    return sorted(name for which, name in found.items() if which not in known)


def _training_nodes(block):
    """The nodes in a block's graph that MXNet normalizes batches with: their names by
    the names of their running statistics.
    """
    return {
        tuple(inputs[-2:]): node["name"]
        for node, inputs in nodes_of(graph_of(block))
        if node["op"] in OPERATORS and not is_frozen(node)
    }


class GraphLayer:
    """A layer that is a node in a SymbolBlock's graph.

    It has the attributes of a :class:`SyncBatchNorm` that other modules use.
    """

    def __init__(self, block: mx.gluon.Block, node: dict, inputs: list[str]) -> None:
        self._attributes = node["attrs"]
        self.name = self._attributes["layer"]
        # By position: data, gamma, beta, (after), (rows), running mean and variance.
        self.running_mean, self.running_var = (block.params[n] for n in inputs[-2:])
        self.key = node["attrs"]["layer_key"]
        load().gluon_syncbn_create_layer(self.key, self.name, False)
        release = load().gluon_syncbn_release_layer  # its block may be gone
        weakref.finalize(self, release, self.key).atexit = False

    def contexts(self) -> list[mx.Context]:
        """Contexts that the layer is initialized on; empty if there is none."""
        return contexts_of(self.running_mean)

    def ranks(self) -> list[int]:
        """The ranks that the layer synchronizes with, the own one included."""
        return ranks_of(self._attributes)
