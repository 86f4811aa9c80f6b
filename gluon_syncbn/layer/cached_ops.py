"""Change graphs with layers so that MXNet runs them safely, and warn if one is saved.

Any block may run such a graph: GluonCV makes SymbolBlocks from symbols of a layer. So
`watch_graphs` replaces ``mx.nd.CachedOp``, MXNet's class that runs graphs. Symbols have
``Custom`` nodes with guards (layer/guards.py), which every version of MXNet can run.
docs/design/mxnet.md has the reasons for the order of layers in static_shape graphs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd

from ..arguments import comma_list
from ..mxnet_private.arrays import push
from ..native import guarded_trainers
from ..native.library import load
from ..native.program_lines import warn
from ..native.turns import here
from ..nested import arrays_in
from . import guards, native_operator
from .symbols import from_nodes, parse, resolve_entry, to_json


def is_ours(node: dict) -> bool:
    """Return True if a node of a graph is a layer."""
    return node["op"] == "Custom" and node["attrs"]["op_type"] == "gluon_syncbn"


def layers_in(symbol: Any) -> list:
    """Return the Synchronization of each layer in a graph, without duplicates."""
    keys = re.findall(r'"layer_key": "(\w+)"', to_json(symbol))
    found = [guarded_trainers.layers.get(key) for key in dict.fromkeys(keys)]
    return [layer for layer in found if layer is not None]


@lru_cache(maxsize=None)
def watch_graphs() -> None:
    """Replace ``mx.nd.CachedOp``, and warn if a graph with layers is saved."""
    base: Any = mx.nd.CachedOp

    class CachedOp(mx.nd.CachedOp):
        def __init__(self, graph: Any, flags: Sequence = ()) -> None:
            is_static = bool(dict(flags).get("static_shape"))
            self.handle = None  # MXNet's destructor frees it, also after an error
            self._statistics: list = []  # indices of running statistics in the inputs
            self._layers = layers_in(graph)
            found = [c for x in self._layers for c in x.contexts or [mx.cpu()]]
            self._is_for_gpus = {c.device_type for c in found} == {"gpu"}
            if self._layers:
                graph = _prepared(graph, is_static, self._is_for_gpus)
                if is_static:
                    written = set(graph.list_auxiliary_states())
                    names = enumerate(graph.list_inputs())
                    self._statistics = [k for k, name in names if name in written]
            super().__init__(graph, flags)
            # A static_shape graph has one mode for all calls, and MXNet changes it when
            # it queues a call. Calls of the other mode may still have to run then.
            needs_two = is_static and (self._layers or here.contexts)
            self._for_training = base(graph, flags) if needs_two else None

        def _register_op_hook(self, *arguments: Any) -> None:
            super()._register_op_hook(*arguments)
            if self._for_training:
                base._register_op_hook(self._for_training, *arguments)  # noqa: SLF001

        def __call__(self, *inputs: Any, **options: Any) -> Any:
            if self._layers:
                first, context = self._layers[0], inputs[0].context
                if self._is_for_gpus and context.device_type == "cpu":
                    raise mx.MXNetError(
                        f"SyncBatchNorm '{first.name}': the graph was traced for GPU "
                        f"contexts and now runs on {context}. Call net.hybridize() "
                        "after moving the parameters."
                    )
                if autograd.is_training():
                    first.warn_of_plain_loop(first.contexts)
            if self._for_training and autograd.is_training():
                outputs = self._for_training(*inputs, **options)
            else:
                outputs = super().__call__(*inputs, **options)
            written = [inputs[k] for k in self._statistics]
            if written:
                # MXNet does not order two calls that write the same statistics.
                do_nothing, context = load().gluon_syncbn_do_nothing, written[0].context
                push(do_nothing, 0, context, arrays_in(outputs), written)
            return outputs

    save_symbol = mx.sym.Symbol.save

    def save(symbol: Any, *args: Any, **options: Any) -> Any:
        layers = layers_in(symbol)
        for layer in layers:
            layer.kept.add(layer)  # the file may be loaded after its block is deleted
        if layers:
            names = [f"'{layer.name}'" for layer in layers]
            warn(
                f"the graph has the SyncBatchNorm layers {comma_list(names)}, which "
                "only this process can run. Call revert_sync_batchnorm(net), then call "
                "the net, before you export it."
            )
        return save_symbol(symbol, *args, **options)

    mx.nd.CachedOp, mx.sym.Symbol.save = CachedOp, save


def _prepared(symbol, is_static, is_for_gpus):
    """Rename a graph's layers, or choose guards; order the layers if it is static."""
    graph = parse(symbol)
    ours = {number for number, node in enumerate(graph["nodes"]) if is_ours(node)}
    dropped = guards.guards_of(graph["nodes"], ours)
    is_native = not is_for_gpus and native_operator.is_used()
    if not is_for_gpus and not is_native:
        dropped = guards.choose_guards(symbol, graph, dropped, is_static)
    nodes: list = []
    entries: list = []  # see resolve_entry in layer/symbols.py
    latest: dict = {}  # {running mean: the latest layer that uses it}

    for number, node in enumerate(graph["nodes"]):
        inputs = [resolve_entry(entry, entries) for entry in node["inputs"]]
        if number in dropped:
            entries.append(inputs[0][:2])
            continue
        attributes = node["attrs"]
        if is_static and number in ours:
            mean = inputs[-2][0]
            if mean in latest and attributes.get("chained") != "True":
                # The additional input of this layer reads only an earlier node, so
                # the order of the graph's inputs does not change.
                after = {"op": "size_array", "name": f"{node['name']}_after"}
                nodes.append({**after, "inputs": [[latest[mean], 0, 0]]})
                inputs.insert(3, [len(nodes) - 1, 0, 0])
                attributes["chained"] = "True"
            latest[mean] = len(nodes)
        entries.append([len(nodes), None])
        nodes.append({**node, "inputs": inputs})
        if is_native and number in ours:
            native_operator.rename(nodes[-1])
    heads = [resolve_entry(head, entries) for head in graph["heads"]]
    return from_nodes(symbol, graph, nodes, heads)
