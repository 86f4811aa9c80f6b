"""Batch normalization inside SymbolBlocks, whose graphs have no blocks.

Called by ``convert.py`` and by all that needs the layers of a net. GluonCV's SSD is
such a net: its features are the graph of a discarded net, followed by more nodes.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import SymbolBlock

from ..mxnet_private.blocks import set_parameter, set_symbol, symbol_of
from ..native.library import load
from . import rewriting
from .activations import Activation, apply
from .batch_norm import SyncBatchNorm, contexts_of, known_momentum
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
    """Tells whether a SymbolBlock's graph has unsynchronized layers, not frozen."""
    nodes = rewriting.nodes_of(_graph_of(block))
    return any(node["op"] in OPERATORS and not is_frozen(node) for node, _ in nodes)


def convert_graph(block: mx.gluon.Block, settings: dict | None = None) -> list[str]:
    """Makes the batch normalization of a SymbolBlock's graph synchronize.

    `settings` are arguments of :class:`SyncBatchNorm`; without them layers that
    synchronize already stay as they are. Returns the names of nodes that
    stay as they are, because their mean and variance are read too.
    """
    symbol = vars(block).setdefault("_unconverted_graph", _graph_of(block))
    used = rewriting.used_outputs(symbol)
    layers, left = {}, []

    def replace(node, inputs):
        if node["op"] in OPERATORS:
            if used[node["name"]] != {0}:
                left.append(node["name"])
                return None
            layer = _layer(block, node, inputs, settings or {})
            layers[node["name"]] = layer
            return _symbol_for(node, layer)
        # With a guard for one mode the operator says itself how the graph can run.
        is_new = settings is not None
        if is_new and _is_ours(node) and node["attrs"]["guard"] == "any":
            # A layer that is used twice keeps one rendezvous.
            key = node["attrs"]["group"]
            if key not in layers:
                layers[key] = _layer(block, node, inputs, settings)
            attributes = layers[key]._attributes(layers[key].contexts())
            del attributes["use_global_stats"]  # the node has its own
            node["attrs"].update((n, str(value)) for n, value in attributes.items())
        return None

    _set_graph(block, rewriting.rewrite(symbol, replace))
    # They live as long as the graph that names their keys.
    block._rendezvous = [layer._sync.rendezvous for layer in layers.values()]
    return left


def revert_graph(block: mx.gluon.Block, revert: Callable) -> None:
    """Restores a SymbolBlock's graph; nodes that were made as ours become BatchNorm.

    `revert` makes a SyncBatchNorm block a BatchNorm, in place.
    """
    symbol = vars(block).pop("_unconverted_graph", _graph_of(block))
    vars(block).pop("_rendezvous", None)

    def reverted(node, inputs):
        layer = _layer(block, node, inputs, {})
        revert(layer)
        return _symbol_for(node, layer)

    _set_graph(block, _replace_ours(symbol, _is_ours, reverted))


def freeze_graph(block: mx.gluon.Block, frozen: bool) -> None:
    """Freezes the batch normalization of a SymbolBlock's graph, or thaws it."""

    def freeze(node, inputs):
        if _is_ours(node):
            load().gluon_syncbn_note_frozen(_shared_name(node).encode(), frozen)
        return _set_frozen(node, inputs, frozen)

    _set_graph(block, rewriting.rewrite(_graph_of(block), freeze))
    original = vars(block).get("_unconverted_graph")
    if original is not None:
        set_frozen = partial(_set_frozen, frozen=frozen)
        block._unconverted_graph = rewriting.rewrite(original, set_frozen)


def _graph_of(block):
    """The graph of a SymbolBlock in which frozen layers are nodes of ours, too."""
    return vars(block).get("_graph_of_layers", symbol_of(block))


def _set_graph(block, symbol):
    """Replaces `_graph_of`; what runs has MXNet's operator for frozen layers."""
    block._graph_of_layers = symbol
    set_symbol(block, _replace_ours(symbol, _is_ours_and_frozen, _frozen_symbol))


def _replace_ours(symbol, is_layer, replacement):
    """A graph with some of our nodes replaced, and their guards left out."""
    nodes = rewriting.nodes_of(symbol)
    ours = {node["name"]: inputs[0] for node, inputs in nodes if is_layer(node)}
    guards_before = set(ours.values())

    def replace(node, inputs):
        if node["name"] in ours:
            return replacement(node, inputs)
        attributes = _IDENTITIES.get(node["op"])
        if attributes is not None and attributes.items() <= node["attrs"].items():
            if node["name"] in guards_before or inputs[0] in ours:
                return mx.sym.var(rewriting.INPUT)
        return None

    return rewriting.rewrite(symbol, replace) if ours else symbol


def _frozen_symbol(node, inputs):
    """MXNet's operator for a node of ours, with the same name."""
    arguments, activation = _settings_of(node)
    arguments["fix_gamma"] = not arguments.pop("scale")
    arguments["eps"] = arguments.pop("epsilon")
    arguments["momentum"] = known_momentum(arguments)
    parameters = map(mx.sym.var, inputs[1:3] + inputs[-2:])
    x = mx.sym.var(rewriting.INPUT)
    y = mx.sym.BatchNorm(
        x, *parameters, **arguments, use_global_stats=True, name=node["name"]
    )
    return apply(mx.sym, y, activation)


def _set_frozen(node, _inputs, frozen):
    if node["op"] in OPERATORS or _is_ours(node):
        node.setdefault("attrs", {})["use_global_stats"] = str(frozen)


def _symbol_for(node, layer):
    """The symbol of a layer in place of a node, as frozen as that."""
    symbol = layer(mx.sym.var(rewriting.INPUT))
    return rewriting.rewrite(symbol, partial(_set_frozen, frozen=is_frozen(node)))


def is_frozen(node: dict) -> bool:
    """Tells whether a node normalizes with its running statistics in training too."""
    return node.get("attrs", {}).get("use_global_stats") in ("True", "1")


def _is_ours(node):
    return node["op"] == "Custom" and node["attrs"]["op_type"] == "gluon_syncbn"


def _is_ours_and_frozen(node):
    return _is_ours(node) and is_frozen(node)


def _shared_name(node):
    return node["attrs"].get("shared_name", node["attrs"]["layer"])


def _settings_of(node):
    """The arguments of SyncBatchNorm, except for `use_global_stats`, and Activation."""
    attributes = node.get("attrs", {})
    momentum = attributes.get("momentum", "0.9")
    activation = attributes.get("activation", "None")
    if node["op"] == "_contrib_BatchNormWithReLU":
        activation = "relu"
    slope = float(attributes.get("slope", 0)) or None
    name = None if activation == "None" else activation
    arguments = {
        "axis": int(attributes.get("axis", 1)),
        "momentum": None if momentum == "None" else float(momentum),
        "epsilon": float(attributes.get("eps", np.float32(1e-3))),
        "scale": attributes.get("fix_gamma", "True") not in ("True", "1"),
    }
    return arguments, Activation(name, slope)


def _layer(block, node, inputs, settings):
    """A SyncBatchNorm with a node's settings and parameters, outside of the net."""
    arguments, activation = _settings_of(node)
    prefix = node["name"]
    prefix = prefix[: -len("_fwd")] if prefix.endswith("_fwd") else prefix
    arguments.update(settings, activation=activation.name, slope=activation.slope)
    layer = SyncBatchNorm(prefix=f"{prefix}_", **arguments)
    names = "gamma", "beta", "running_mean", "running_var"
    for name, source in zip(names, inputs[1:3] + inputs[-2:]):
        set_parameter(layer, name, block.params[source])
    return layer
