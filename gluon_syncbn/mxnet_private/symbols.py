"""Symbols as lists of nodes, and copies of symbols with nodes replaced.

MXNet's symbols are immutable, so these functions work on the JSON form.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, Callable

import mxnet as mx

_load = getattr(mx.sym, "load_json", None) or mx.sym.fromjson  # MXNet 2 renamed it
# MXNet 1.6 keeps casts. Later versions remove them by default, and leak the graph
# without.
_HAS_OPTION = "remove_amp_cast" in inspect.signature(mx.sym.Symbol.tojson).parameters
_WITH_CASTS: dict = {"remove_amp_cast": False} if _HAS_OPTION else {}

INPUT = "gluon_syncbn_input"  # stands for a replaced node's first input


def nodes_of(symbol: Any) -> list[dict]:
    """Return the nodes of a graph in topological order.

    A node has ``op`` ("null" is a variable), ``name``, ``attrs``, which is a dict of
    strings, and ``inputs``, each of which begins with a node's number and output.
    """
    return parse(symbol)["nodes"]


def input_names(nodes: list[dict], node: dict) -> list[str]:
    """Return the names of the nodes that a node reads."""
    return [nodes[number]["name"] for number, *_ in node["inputs"]]


def used_outputs(symbol: Any) -> dict[int, set[int]]:
    """Return the outputs of each node that are read, by the node's number."""
    graph, used = parse(symbol), {}
    entries = [entry for node in graph["nodes"] for entry in node["inputs"]]
    for number, output, *_ in entries + graph["heads"]:
        used.setdefault(number, set()).add(output)
    return used


def rewrite(symbol: Any, replace: Callable[[int, dict], Any]) -> Any:
    """Return a copy of a symbol with nodes replaced.

    `replace` is called with each node's number and the node. If it returns None, the
    node is kept, including changes that `replace` made to its ``attrs``. If it returns
    a symbol with one output, this output replaces the node's first output. In that
    symbol the variable :data:`INPUT` stands for the node's first input, and any other
    variable is the graph's variable of the same name.
    """
    old, nodes, variables = parse(symbol), [], {}

    def add(node, entries):
        """Add a node whose inputs are looked up in `entries`; return its number."""
        is_variable = node["op"] == "null"  # one node for each name
        if is_variable and node["name"] in variables:
            return variables[node["name"]]
        inputs = [_resolve(entry, entries) for entry in node["inputs"]]
        nodes.append({**node, "inputs": inputs})
        if is_variable:
            variables[node["name"]] = len(nodes) - 1
        return len(nodes) - 1

    def splice(piece, first_input):
        """Add the nodes of a symbol; return the entry of its output."""
        graph, entries = parse(piece), []
        for node in graph["nodes"]:
            is_input = node["name"] == INPUT
            entries.append(first_input[:2] if is_input else [add(node, entries), None])
        return _resolve(graph["heads"][0], entries)[:2]

    entries: list = []  # a new entry [node, output] for each old node
    for number, node in enumerate(old["nodes"]):
        piece = replace(number, node)
        if piece is None:
            entries.append([add(node, entries), None])
        else:
            entries.append(splice(piece, _resolve(node["inputs"][0], entries)))
    heads = [_resolve(head, entries) for head in old["heads"]]
    return from_nodes(symbol, old, nodes, heads)


def from_nodes(symbol: Any, graph: dict, nodes: list, heads: list) -> Any:
    """Return a symbol of the kind of `symbol`, with other nodes and heads."""
    graph.update(nodes=nodes, heads=heads)
    graph["arg_nodes"] = [k for k, node in enumerate(nodes) if node["op"] == "null"]
    graph.pop("node_row_ptr", None)  # MXNet computes it
    made = _load(json.dumps(graph))
    return made if type(symbol) is mx.sym.Symbol else made.as_np_ndarray()


def to_json(symbol: Any) -> str:
    """Return a symbol's JSON form as text."""
    return symbol.tojson(**_WITH_CASTS)


def parse(symbol: Any) -> dict:
    """Return a symbol's JSON form, with ``attrs`` for every node."""
    graph = json.loads(to_json(symbol))
    for node in graph["nodes"]:
        node.setdefault("attrs", {})
    return graph


def _resolve(entry, entries):
    """Return an old entry [node, output, version] as an entry of the new graph.

    A node that was replaced has its first output only.
    """
    source, output, *version = entry
    number, only_output = entries[source]
    return [number, output if only_output is None else only_output, *version]
