"""Batch normalization inside SymbolBlocks, whose graphs have no blocks.

Called by ``convert.py`` and by all that needs the layers of a net. GluonCV's SSD is
such a net: its features are the graph of a discarded net, followed by more nodes.
"""

from __future__ import annotations

from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import SymbolBlock

from ..mxnet_private.blocks import set_parameter, set_symbol, symbol_of
from . import rewriting
from .batch_norm import SyncBatchNorm, contexts_of
from .synchronization import ranks_of

OPERATORS = ("BatchNorm", "_contrib_BatchNormWithReLU", "_contrib_SyncBatchNorm")
# A guard consists of these, and has no use without its layer; see layout_guard.py.
_IDENTITIES = {
    "SliceChannel": {"num_outputs": "1"},
    "Reshape": {"shape": "(-2,)"},
    "transpose": {"axes": "(0, 1, 2, 3)"},
}


def synchronized_layers(net: mx.gluon.Block) -> list:
    """All SyncBatchNorm layers of a net, itself included, and all GraphLayers."""
    layers = []

    def collect(block):
        if isinstance(block, SyncBatchNorm):
            layers.append(block)
        elif isinstance(block, SymbolBlock):
            nodes = rewriting.nodes_of(symbol_of(block))
            ours = [(node, inputs) for node, inputs in nodes if _is_ours(node)]
            layers.extend(GraphLayer(block, node, inputs) for node, inputs in ours)

    net.apply(collect)
    return layers


def running_statistics(net: mx.gluon.Block) -> list[tuple]:
    """The parameters (mean, variance) of every batch normalization, of any kind."""
    found = {}  # by identity, because layers may share them

    def collect(block):
        if "running_mean" in vars(block):
            found[block.running_mean] = block.running_var
        elif isinstance(block, SymbolBlock):
            for node, inputs in rewriting.nodes_of(symbol_of(block)):
                if node["op"] in OPERATORS or _is_ours(node):
                    mean, var = (block.params[name] for name in inputs[-2:])
                    found[mean] = var

    net.apply(collect)
    return list(found.items())


class GraphLayer:
    """A layer that is a node in a SymbolBlock's graph.

    It has the methods of a :class:`SyncBatchNorm` that other modules call.
    """

    def __init__(self, block: mx.gluon.Block, node: dict, inputs: list[str]) -> None:
        self._attributes = node["attrs"]
        self.name = self._attributes["layer"]
        # By position: data, gamma, beta, (after), running mean, running variance.
        self.running_mean, self.running_var = (block.params[n] for n in inputs[-2:])

    def contexts(self) -> list[mx.Context]:
        """Contexts that the layer is initialized on; empty if there is none."""
        return contexts_of(self.running_mean)

    def groups(self) -> list[tuple[str, Sequence[mx.Context]]]:
        """The keys of the layer's groups in native code, each with its contexts."""
        key, groups = self._attributes["group"], self._attributes.get("device_groups")
        if not groups:
            return [(key, self.contexts())]
        return [
            (f"{key}/{i}", list(map(_context, group.split())))
            for i, group in enumerate(groups.split(";"))
        ]

    def ranks(self) -> list[int]:
        """The ranks that the layer synchronizes with, the own one included."""
        return ranks_of(self._attributes)


def _context(text):
    kind, number = text.rstrip(")").split("(")
    return mx.Context(kind, int(number))


def has_batch_norm(block: mx.gluon.Block) -> bool:
    """Tells whether a SymbolBlock's graph has nodes for `convert_graph`."""
    nodes = rewriting.nodes_of(symbol_of(block))
    return any(node["op"] in OPERATORS for node, _ in nodes)


def convert_graph(block: mx.gluon.Block, settings: dict | None = None) -> list[str]:
    """Makes the batch normalization of a SymbolBlock's graph synchronize.

    `settings` are arguments of :class:`SyncBatchNorm`; without them layers that
    synchronize already stay as they are. Returns the names of nodes that
    stay as they are, because their mean and variance are read too.
    """
    symbol = vars(block).setdefault("_unconverted_graph", symbol_of(block))
    used = rewriting.used_outputs(symbol)
    layers, left = {}, []

    def replace(node, inputs):
        if node["op"] in OPERATORS:
            if used[node["name"]] != {0}:
                left.append(node["name"])
                return None
            layer = _layer(block, node, inputs, settings or {})
            layers[node["name"]] = layer
            return layer(mx.sym.var(rewriting.INPUT))
        # With a guard for one mode the operator says itself how the graph can run.
        is_new = settings is not None
        if is_new and _is_ours(node) and node["attrs"]["guard"] == "any":
            # A layer that is used twice keeps one rendezvous.
            key = node["attrs"]["group"]
            if key not in layers:
                layers[key] = _layer(block, node, inputs, settings)
            attributes = layers[key]._attributes(layers[key].contexts())
            node["attrs"].update((n, str(value)) for n, value in attributes.items())
        return None

    set_symbol(block, rewriting.rewrite(symbol, replace))
    # They live as long as the graph that names their keys.
    block._rendezvous = [layer._sync.rendezvous for layer in layers.values()]
    return left


def revert_graph(block: mx.gluon.Block, revert: Callable) -> None:
    """Restores a SymbolBlock's graph; nodes that were made as ours become BatchNorm.

    `revert` makes a SyncBatchNorm block a BatchNorm, in place.
    """
    symbol = vars(block).pop("_unconverted_graph", symbol_of(block))
    vars(block).pop("_rendezvous", None)
    nodes = rewriting.nodes_of(symbol)
    ours = {node["name"]: inputs[0] for node, inputs in nodes if _is_ours(node)}
    guards_before = set(ours.values())

    def replace(node, inputs):
        if _is_ours(node):
            layer = _layer(block, node, inputs, {})
            revert(layer)
            return layer(mx.sym.var(rewriting.INPUT))
        attributes = _IDENTITIES.get(node["op"])
        if attributes is not None and attributes.items() <= node["attrs"].items():
            if node["name"] in guards_before or inputs[0] in ours:
                return mx.sym.var(rewriting.INPUT)
        return None

    set_symbol(block, rewriting.rewrite(symbol, replace) if ours else symbol)


def is_frozen(node: dict) -> bool:
    """Tells whether a node normalizes with its running statistics in training too."""
    return node.get("attrs", {}).get("use_global_stats") in ("True", "1")


def _is_ours(node):
    return node["op"] == "Custom" and node["attrs"]["op_type"] == "gluon_syncbn"


def _layer(block, node, inputs, settings):
    """A SyncBatchNorm with a node's settings and parameters, outside of the net."""
    attributes = node.get("attrs", {})
    momentum = attributes.get("momentum", "0.9")
    activation = attributes.get("activation", "None")
    if node["op"] == "_contrib_BatchNormWithReLU":
        activation = "relu"
    slope = float(attributes.get("slope", 0)) or None
    arguments = {
        "axis": int(attributes.get("axis", 1)),
        "momentum": None if momentum == "None" else float(momentum),
        "epsilon": float(attributes.get("eps", np.float32(1e-3))),
        "scale": attributes.get("fix_gamma", "True") not in ("True", "1"),
        "use_global_stats": is_frozen(node),
    }
    prefix = node["name"]
    prefix = prefix[: -len("_fwd")] if prefix.endswith("_fwd") else prefix
    name = None if activation == "None" else activation
    layer = SyncBatchNorm(
        prefix=f"{prefix}_", activation=name, slope=slope, **arguments, **settings
    )
    names = "gamma", "beta", "running_mean", "running_var"
    for name, source in zip(names, inputs[1:3] + inputs[-2:]):
        set_parameter(layer, name, block.params[source])
    return layer
