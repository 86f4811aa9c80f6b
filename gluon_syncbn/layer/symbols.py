"""Edit the graphs of symbols, which MXNet's own functions cannot change.

Symbols are immutable, so these functions work on their JSON form.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, Callable

import mxnet as mx

_load = getattr(mx.sym, "load_json", None) or mx.sym.fromjson  # MXNet 2 renamed it
# MXNet 1.6 keeps AMP's casts. Later versions by default remove them, in a copy of the
# graph that leaks.
_HAS_OPTION = "remove_amp_cast" in inspect.signature(mx.sym.Symbol.tojson).parameters
_WITH_CASTS: dict = {"remove_amp_cast": False} if _HAS_OPTION else {}

INPUT = "gluon_syncbn_input"  # the name of a variable, see `rewrite`


def rewrite(symbol: Any, replace: Callable[[int, dict], Any]) -> Any:
    """Return a copy of a symbol with nodes replaced.

    `replace` is called with each node's number and the node. If it returns None, the
    node is kept, including changes that `replace` made to its ``attrs``. If it returns
    a symbol with one output, this output replaces all outputs of the node. A variable
    of this symbol named :data:`INPUT` is replaced by the node's first input. Other
    variables are the graph's variables of the same names.
    """
    old, nodes = parse(symbol), []
    variables: dict = {}  # the number of each variable, by name

    def add(graph, replace, first_input=None):
        """Add the nodes of a graph; return entries as `resolve_entry` takes them."""
        entries: list = []
        for number, node in enumerate(graph["nodes"]):
            name, piece = node["name"], replace(number, node)
            if name == INPUT:
                entries.append(first_input)
            elif node["op"] == "null" and name in variables:
                entries.append([variables[name], None])
            elif piece is None:
                inputs = [resolve_entry(entry, entries) for entry in node["inputs"]]
                if node["op"] == "null":
                    variables[name] = len(nodes)
                entries.append([len(nodes), None])
                nodes.append({**node, "inputs": inputs})
            else:
                piece = parse(piece)
                first = resolve_entry(node["inputs"][0], entries)[:2]
                added = add(piece, lambda *_: None, first)
                entries.append(resolve_entry(piece["heads"][0], added)[:2])
        return entries

    entries = add(old, replace)
    heads = [resolve_entry(head, entries) for head in old["heads"]]
    return from_nodes(symbol, old, nodes, heads)


def from_nodes(symbol: Any, graph: dict, nodes: list, heads: list) -> Any:
    """Replace nodes and heads in `graph`; return it as a symbol of `symbol`'s class."""
    graph.update(nodes=nodes, heads=heads)
    graph["arg_nodes"] = [k for k, node in enumerate(nodes) if node["op"] == "null"]
    graph.pop("node_row_ptr", None)  # MXNet computes it
    made = _load(json.dumps(graph))
    return made if type(symbol) is mx.sym.Symbol else made.as_np_ndarray()


def to_json(symbol: Any) -> str:
    return symbol.tojson(**_WITH_CASTS)


def parse(symbol: Any) -> dict:
    """Return a symbol's JSON form, whose ``nodes`` are in topological order.

    A node has ``op`` ("null" for a variable), ``name``, ``attrs`` (a dict of strings)
    and ``inputs``. An input is a list [number of a node, number of its output, ...].
    """
    graph = json.loads(to_json(symbol))
    for node in graph["nodes"]:
        node.setdefault("attrs", {})
    return graph


def resolve_entry(entry: list, entries: list) -> list:
    """Return an old input [node, output, version] as an input in the new graph.

    `entries` has [new node, new output] for each old node. A new output of None means
    that outputs keep their numbers.
    """
    source, old_output, *version = entry
    number, output = entries[source]
    return [number, old_output if output is None else output, *version]
