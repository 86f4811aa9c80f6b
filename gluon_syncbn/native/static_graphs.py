"""Order the uses of running statistics in static_shape graphs.

MXNet treats running statistics in such graphs as inputs that are only read. Nothing
would order two layers that share them, or two calls with independent inputs, so one
device's first use could meet another device's second use.

Any block may run such a graph. GluonCV for example makes SymbolBlocks of a layer's
symbols, which are traced without the layer. So the first layer that is traced replaces
the class of all graphs.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Iterator, Sequence

import mxnet as mx

from ..common.nested import arrays_in
from ..mxnet_private.library import push
from ..mxnet_private.symbols import from_nodes, parse
from .library import load


@contextmanager
def call_guarded(guard: str) -> Iterator[None]:
    """Allow calls of graphs with this guard in the ``with`` block."""
    load().gluon_syncbn_call_guarded(guard, True)
    try:
        yield
    finally:
        load().gluon_syncbn_call_guarded(guard, False)


@lru_cache(maxsize=None)
def order_calls() -> None:
    """Order the uses of our layers' statistics in and between static_shape graphs."""

    class CachedOp(mx.nd.CachedOp):
        def __init__(self, graph: Any, flags: Sequence = ()) -> None:
            self._statistics: list = []  # positions of running statistics in the inputs
            if dict(flags).get("static_shape"):
                graph, has_ours = _in_sequence(graph)
                written = set(graph.list_auxiliary_states() if has_ours else ())
                names = enumerate(graph.list_inputs())
                self._statistics = [k for k, name in names if name in written]
            super().__init__(graph, flags)

        def __call__(self, *inputs: Any, **options: Any) -> Any:
            written = [inputs[k] for k in self._statistics]
            if not written:
                return super().__call__(*inputs, **options)
            with call_guarded("static_shape"):
                outputs = super().__call__(*inputs, **options)
            # Later uses of the statistics wait for the end of the call.
            end, context = load().gluon_syncbn_do_nothing, written[0].context
            push(end, 0, context, arrays_in(outputs), written)
            return outputs

    mx.nd.CachedOp = CachedOp


def _in_sequence(symbol):
    """Return a graph in which uses of the same statistics are ordered, and if any are.

    MXNet visits nodes in the listed order, and a new edge leads only to an earlier
    node. So the order of the graph's inputs does not change.
    """
    graph = parse(symbol)
    nodes: list = []
    numbers: list = []  # the new number of each old node
    latest: dict = {}  # the last node that used each running mean
    for node in graph["nodes"]:
        inputs = [[numbers[number], *rest] for number, *rest in node["inputs"]]
        attributes = node["attrs"]
        if node["op"] == "Custom" and attributes["op_type"] == "gluon_syncbn":
            mean = inputs[-2][0]
            if mean in latest and attributes.get("chained") != "True":
                after = {"op": "size_array", "name": f"{node['name']}_after"}
                nodes.append({**after, "inputs": [[latest[mean], 0, 0]]})
                inputs.insert(3, [len(nodes) - 1, 0, 0])
                attributes["chained"] = "True"
            latest[mean] = len(nodes)
        numbers.append(len(nodes))
        nodes.append({**node, "inputs": inputs})
    if len(nodes) == len(numbers):
        return symbol, bool(latest)
    heads = [[numbers[number], *rest] for number, *rest in graph["heads"]]
    return from_nodes(symbol, graph, nodes, heads), True
