"""The batch normalizations in the graphs of SymbolBlocks.

This module makes a layer for each node, with the node's settings and parameters. If the
layer is converted, reverted or frozen, the graph is remade.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import SymbolBlock, nn

from ..mxnet_private import blocks
from ..native import guarded_trainers
from . import symbols
from .batch_norm import PARAMETERS, SyncBatchNorm
from .cached_ops import is_ours
from .guards import guards_of
from .norm_kinds import CONTRIB, FROZEN, RELU, Norm

_OPERATORS = {
    "BatchNorm": nn.BatchNorm,
    "_contrib_BatchNormWithReLU": RELU,
    "_contrib_SyncBatchNorm": CONTRIB,
}
_TRUE = "True", "1"


@dataclasses.dataclass  # not a NamedTuple, because MXNet warns of tuples with layers
class _Source:
    """The original graph of a SymbolBlock, and the graph that was made from it."""

    graph: Any
    norms: dict  # {number of a node in `graph`: Norm}
    made: Any
    keys: list  # `Synchronization.key` of each layer in `made`


def _keys_of(norms):
    layers = [norm.layer for norm in norms.values()]
    return [layer._sync.key for layer in layers if isinstance(layer, SyncBatchNorm)]


def norms_in(block: SymbolBlock) -> list[Norm]:
    """Return the batch normalizations of a SymbolBlock without duplicates."""
    return list(dict.fromkeys(_source_of(block).norms.values()))


def _source_of(block):
    source = vars(block).get("_source")
    if source is None or source.made is not blocks.graph_of(block):
        source = block._source = _read(block)
    elif source.keys != _keys_of(source.norms):  # deepcopy gives layers new keys
        remake_graph(block)
    return source


def _read(block):
    graph = blocks.graph_of(block)
    parsed = symbols.parse(graph)
    nodes = parsed["nodes"]
    entries = parsed["heads"] + [entry for node in nodes for entry in node["inputs"]]
    used = {(source, output) for source, output, *_ in entries}
    masked = {node["attrs"]["layer_key"] for node in nodes if _is_masked(node)}
    layers, norms = {}, {}
    for number, node in enumerate(nodes):
        if node["op"] not in _OPERATORS and not is_ours(node):
            continue
        inputs = [nodes[n]["name"] for n, *_ in node["inputs"]]
        inputs = inputs[1:3] + inputs[-2:]
        key = node["attrs"].get("layer_key", number)  # two nodes may have one layer
        if key not in layers:
            layers[key] = _layer_of(node, inputs, block.params)
        layer = layers[key]
        computed = [n for n, i in zip(PARAMETERS, inputs) if i not in block.params]
        reason = f"the graph computes {' and '.join(computed)}" if computed else ""
        if node["op"] in _OPERATORS and used & {(number, 1), (number, 2)}:
            reason = "the graph reads its mean or variance"
        name = layer._sync.name if is_ours(node) else _prefix(node)
        norms[number] = Norm(name, layer, reason, block, key in masked)
    return _Source(graph, norms, graph, _keys_of(norms))


def _layer_of(node, inputs, parameters):
    attributes = node["attrs"]
    cls = _OPERATORS.get(node["op"], nn.BatchNorm)
    options = {"num_devices": 1} if cls is CONTRIB else {}  # MXNet warns without it
    layer = blocks.make_named(cls, _prefix(node), **options)
    if is_ours(node):
        layer._sync = guarded_trainers.layers[attributes["layer_key"]]
        layer.__class__ = SyncBatchNorm
        settings = {**layer._sync.norm_settings, FROZEN: False}
    else:
        settings = {
            "axis": int(attributes.get("axis", 1)),
            "eps": float(attributes.get("eps", np.float32(1e-3))),
            "momentum": float(attributes.get("momentum", 0.9)),
            "fix_gamma": attributes.get("fix_gamma", "True") in _TRUE,
            FROZEN: _is_frozen(node),
        }
    blocks.set_settings(layer, {**blocks.settings_of(layer), **settings})
    for name, source in zip(PARAMETERS, inputs):
        if source in parameters:
            blocks.set_parameter(layer, name, parameters[source])
    return layer


def remake_graph(block: SymbolBlock) -> None:
    """Make the graph of a SymbolBlock from its layers."""
    source = block._source
    nodes, norms = symbols.parse(source.graph)["nodes"], source.norms
    changes = {number: _change(nodes[number], norms[number]) for number in norms}
    replaced = {number for number, change in changes.items() if change is None}
    ours = {number for number in replaced if is_ours(nodes[number])}
    dropped = guards_of(nodes, ours)  # operators that a call of the layer adds again

    def replace(number, node):
        if number in replaced:
            return _symbol_of(norms[number].layer, _is_masked(node))
        node["attrs"].update(changes.get(number, {}))
        return mx.sym.var(symbols.INPUT) if number in dropped else None

    source.made = source.graph
    if any(change != {} for change in changes.values()):
        source.made = symbols.rewrite(source.graph, replace)
    source.keys = _keys_of(norms)
    blocks.set_graph(block, source.made)


def _change(node, norm):
    """Return new attributes for a node, or None if it needs another operator."""
    layer, is_frozen = norm.layer, blocks.settings_of(norm.layer)[FROZEN]
    if is_ours(node):
        if type(layer) is not SyncBatchNorm or is_frozen:
            return None
        layer._sync.register(getattr(layer, name) for name in PARAMETERS)
        layer._sync.update(layer.contexts(), blocks.settings_of(layer))
        layer._sync.kept.add(layer._sync)
        return {"layer_key": layer._sync.key}
    if not norm.reason and type(layer) is not _OPERATORS[node["op"]]:
        return None
    return {} if is_frozen == _is_frozen(node) else {FROZEN: str(is_frozen)}


def _symbol_of(layer, is_masked):
    """Call a layer on a variable that `symbols.rewrite` replaces by a node's input."""
    data, settings = mx.sym.var(symbols.INPUT), blocks.settings_of(layer)
    if is_masked:  # the node's input is a matrix (elements, channels)
        blocks.set_settings(layer, {**settings, "axis": -1})
    symbol = layer(data.as_np_ndarray() if mx.util.is_np_array() else data)
    blocks.set_settings(layer, settings)
    return symbol


def _is_masked(node):
    return node["attrs"].get("masked") in _TRUE


def _is_frozen(node):
    return node["attrs"].get(FROZEN) in _TRUE


def _prefix(node):
    return re.sub("_fwd$", "", node["name"])
