"""Converts the batch normalization inside SymbolBlocks, whose graphs have no blocks.

GluonCV's SSD has such a block: its features are the graph of a discarded net, followed
by more nodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet.gluon import SymbolBlock

from ..common.mxnet_version import IS_GLUON_2
from ..mxnet_private.blocks import graph_of, set_graph, set_parameter, settings_of
from ..native.library import load
from . import rewriting
from .activations import Activation
from .batch_norm import SyncBatchNorm
from .finding import OPERATORS, is_frozen, is_ours
from .layout_guard import is_guard


@dataclasses.dataclass
class _Source:
    """All that a SymbolBlock's graph is made of, once it is not the first one.

    No tuple: MXNet would warn of the layers, as of children that are not registered.
    """

    graph: Any  # the first one, but for the marks of frozen nodes
    settings: dict | None = None  # of `convert_graph`; None if it is not converted
    # Made for nodes; the keys in the graph live as long as these.
    layers: dict = dataclasses.field(default_factory=dict)


def check_symbol_block(block: mx.gluon.Block) -> None:
    """Raises NotImplementedError for a SymbolBlock that cannot be changed.

    The blocks of MXNet 2 take no symbols, of which the new nodes would be made.
    """
    if not IS_GLUON_2 or not isinstance(block, SymbolBlock):
        return
    found = [node["op"] for node, _ in rewriting.nodes_of(graph_of(block))]
    if not {*OPERATORS, "Custom"}.isdisjoint(found):
        raise NotImplementedError(
            "a SymbolBlock with batch normalization cannot be changed in MXNet 2, "
            "expected the blocks that its graph was made of"
        )


def convert_graph(block: SymbolBlock, settings: dict) -> list[str]:
    """Makes the batch normalization of a SymbolBlock's graph synchronize.

    `settings` are arguments of :class:`SyncBatchNorm`; without any, layers that
    synchronize already stay as they are. Returns the names of nodes that stay as they
    are, because their mean and variance are read too.
    """
    graph = _source_of(block).graph
    _remake(block, _Source(graph, settings))
    used = rewriting.used_outputs(graph)
    names = [n["name"] for n, _ in rewriting.nodes_of(graph) if n["op"] in OPERATORS]
    return [name for name in names if used[name] != {0}]


def revert_graph(block: SymbolBlock, revert: Callable) -> None:
    """Restores a SymbolBlock's graph; nodes that were made as ours become BatchNorm.

    `revert` makes a SyncBatchNorm block a BatchNorm, in place.
    """

    def revert_node(node, inputs):
        layer = _layer(block, node, inputs, {"use_global_stats": is_frozen(node)})
        revert(layer)
        return layer(mx.sym.var(rewriting.INPUT))

    graph = _replace_ours(_source_of(block).graph, is_ours, revert_node)
    _remake(block, _Source(graph))


def freeze_graph(block: SymbolBlock, frozen: bool) -> None:
    """Freezes the batch normalization of a SymbolBlock's graph, or thaws it."""

    def freeze(node, _inputs):
        if node["op"] in OPERATORS or is_ours(node):
            node.setdefault("attrs", {})["use_global_stats"] = str(frozen)

    source, before = _source_of(block), rewriting.nodes_of(graph_of(block))
    marked = rewriting.rewrite(source.graph, freeze)
    _remake(block, dataclasses.replace(source, graph=marked))
    # Layers that freeze are nodes of ours before, and those that thaw are afterwards.
    for node, _ in before + rewriting.nodes_of(graph_of(block)):
        if is_ours(node):
            name = node["attrs"].get("shared_name", node["attrs"]["layer"])
            load().gluon_syncbn_note_frozen(name, frozen)


def _source_of(block):
    return vars(block).get("_source", _Source(graph_of(block)))


def _remake(block, source):
    """Makes the graph that runs; it has MXNet's own operator for frozen layers."""
    block._source = source
    graph, settings, layers = source.graph, source.settings, source.layers
    used = rewriting.used_outputs(graph)

    def layer_for(key, node, inputs):
        if key not in layers:
            layers[key] = _layer(block, node, inputs, settings)
        return layers[key]

    def convert_node(node, inputs):
        if node["op"] in OPERATORS and used[node["name"]] == {0}:
            layer = layer_for(node["name"], node, inputs)
            settings_of(layer)["use_global_stats"] = is_frozen(node)
            return layer(mx.sym.var(rewriting.INPUT))
        # With a guard for one mode the operator says itself how the graph can run.
        if settings and is_ours(node) and node["attrs"]["guard"] == "any":
            # A layer that is used twice stays one.
            layer = layer_for(node["attrs"]["layer_key"], node, inputs)
            attributes = layer._attributes(layer.contexts())
            del attributes["use_global_stats"]  # the node has its own
            node["attrs"].update((n, str(value)) for n, value in attributes.items())
        return None

    def frozen(node, inputs):
        layer = _layer(block, node, inputs, {"use_global_stats": True})
        return layer(mx.sym.var(rewriting.INPUT))

    if settings is not None:
        graph = rewriting.rewrite(graph, convert_node)
    set_graph(block, _replace_ours(graph, _is_ours_and_frozen, frozen))


def _is_ours_and_frozen(node):
    return is_ours(node) and is_frozen(node)


def _replace_ours(symbol, is_layer, replacement):
    """A graph with some of our nodes replaced, and their guards left out."""
    nodes = rewriting.nodes_of(symbol)
    ours = {node["name"]: inputs[0] for node, inputs in nodes if is_layer(node)}
    guards_before = set(ours.values())

    def replace(node, inputs):
        if node["name"] in ours:
            return replacement(node, inputs)
        if is_guard(node) and (node["name"] in guards_before or inputs[0] in ours):
            return mx.sym.var(rewriting.INPUT)
        return None

    return rewriting.rewrite(symbol, replace) if ours else symbol


def _settings_of(node):
    """The arguments of SyncBatchNorm, except for `use_global_stats`, and Activation."""
    attributes = node.get("attrs", {})
    activation = attributes.get("activation", "None")
    if node["op"] == "_contrib_BatchNormWithReLU":
        activation = "relu"
    slope = float(attributes.get("slope", 0)) or None
    name = None if activation == "None" else activation
    arguments = {
        "axis": int(attributes.get("axis", 1)),
        "momentum": float(attributes.get("momentum", 0.9)),
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
