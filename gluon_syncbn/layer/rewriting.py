"""Replaces nodes in a symbol's graph.

It works on the JSON form of graphs, because MXNet's symbols cannot be changed; it must
not know what the nodes mean.
"""

from __future__ import annotations

import json
from typing import Any, Callable

import mxnet as mx

INPUT = "gluon_syncbn_input"  # stands for a replaced node's first input


def nodes_of(symbol: Any) -> list[tuple[dict, list[str]]]:
    """The nodes of a graph in topological order, each with the names of its inputs.

    A node has ``op``, ``name`` and perhaps ``attrs``, a dict of strings.
    """
    nodes = json.loads(symbol.tojson())["nodes"]
    return [
        (node, [nodes[source]["name"] for source, *_ in node["inputs"]])
        for node in nodes
    ]


def used_outputs(symbol: Any) -> dict[str, set[int]]:
    """The outputs of each node that are read, by the node's name."""
    graph, used = json.loads(symbol.tojson()), {}
    entries = [entry for node in graph["nodes"] for entry in node["inputs"]]
    for source, output, *_ in entries + graph["heads"]:
        used.setdefault(graph["nodes"][source]["name"], set()).add(output)
    return used


def rewrite(symbol: Any, replace: Callable[[dict, list[str]], Any]) -> Any:
    """A copy of a symbol with nodes replaced.

    `replace` is called with each node and the names of its inputs, as by
    :func:`nodes_of`. Where it returns None the node stays, with changes of its
    ``attrs``; where it returns a symbol with one output, that replaces the node's first
    output. In that symbol the variable :data:`INPUT` is the node's first input, and
    other variables are those of the graph that have the same name.
    """
    old = json.loads(symbol.tojson())
    graph = _Graph()
    entries = []  # per old node its new entry as a list [node, output, version]
    for node, sources in nodes_of(symbol):
        piece = replace(node, sources)
        if piece is None:
            entries.append([graph.add(node, entries), None])
        else:
            entries.append(graph.splice(piece, _resolve(node["inputs"][0], entries)))
    old["heads"] = [_resolve(head, entries) for head in old["heads"]]
    old["nodes"] = graph.nodes
    old["arg_nodes"] = [i for i, n in enumerate(graph.nodes) if n["op"] == "null"]
    del old["node_row_ptr"]  # MXNet computes it
    library = mx.sym if type(symbol) is mx.sym.Symbol else mx.sym.np
    return library.load_json(json.dumps(old))


class _Graph:
    """Nodes of a new graph; a variable's name stands for one node."""

    def __init__(self):
        self.nodes, self._variables = [], {}

    def add(self, node, entries):
        """Adds a node whose inputs are looked up in `entries`; returns its number."""
        if node["op"] == "null" and node["name"] in self._variables:
            return self._variables[node["name"]]
        inputs = [_resolve(entry, entries) for entry in node["inputs"]]
        self.nodes.append({**node, "inputs": inputs})
        number = len(self.nodes) - 1
        if node["op"] == "null":
            self._variables[node["name"]] = number
        return number

    def splice(self, piece, first_input):
        """Adds the nodes of a symbol; returns the entry of its output."""
        graph, entries = json.loads(piece.tojson()), []
        for node in graph["nodes"]:
            if node["name"] == INPUT:
                entries.append(first_input[:2])
            else:
                entries.append([self.add(node, entries), None])
        (head,) = graph["heads"]
        return _resolve(head, entries)[:2]


def _resolve(entry, entries):
    """An old entry [node, output, version] as one of the new graph.

    A node that stays has all its outputs; a replaced one has the first only.
    """
    source, output, *version = entry
    number, only_output = entries[source]
    return [number, output if only_output is None else only_output, *version]
