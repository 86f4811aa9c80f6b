"""Change graphs with layers so that MXNet runs them safely, and warn if one is saved.

Any block may run such a graph: GluonCV makes SymbolBlocks from symbols of a layer. So
`watch_graphs` replaces ``mx.nd.CachedOp``, MXNet's class that runs graphs.

A guard is an operator before or after a layer that makes the layer's input, or the
gradient of its output, plain: row-major instead of oneDNN's blocked layout. The reasons
for guards, and for the order of layers in static_shape graphs, are in
docs/design/mxnet.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..arguments import comma_list
from ..compat import IS_GLUON_2
from ..mxnet_private.arrays import arrays_in, push
from ..mxnet_private.blocks import BatchNormBase, current_build
from ..mxnet_private.graphs import from_nodes, parse, resolve_entry, to_json
from ..native import steps
from ..native.failures import here, warn
from ..native.library import load


def guarded(F: Any, value: Any) -> Any:
    """Return a copy of a value. A copy is a guard that is safe in every mode."""
    # amp_multicast is faster, but it ignores grad_req="add" of a graph's input.
    return F.SliceChannel(value, num_outputs=1)


def plain_gradient(y: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return a view of a layer's output whose gradient is plain."""
    if y.context.device_type == "gpu" or not autograd.is_recording():
        return y
    if isinstance(y, mx.np.ndarray):
        return y.as_nd_ndarray().reshape(y.shape).as_np_ndarray()
    return y.reshape(y.shape)


def is_ours(node: dict) -> bool:
    """Return True if a node of a graph is a layer."""
    return node["op"] == "Custom" and node["attrs"]["op_type"] == "gluon_syncbn"


def layers_in(symbol: Any) -> list:
    """Return the Synchronization of each layer in a graph, without duplicates."""
    keys = re.findall(r'"layer_key": "(\w+)"', to_json(symbol))
    found = [steps.layers.get(key) for key in dict.fromkeys(keys)]
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
    """Choose a graph's guards; in static_shape graphs also order the layers."""
    graph, (block, _) = parse(symbol), current_build()
    ours = {number for number, node in enumerate(graph["nodes"]) if is_ours(node)}
    dropped, guards = {}, guards_of(graph["nodes"], ours)
    # A layer that is hybridized alone makes its arrays plain in `forward`.
    if is_for_gpus or isinstance(block, BatchNormBase) and not IS_GLUON_2:
        dropped = guards
    else:
        _choose_guards(symbol, graph, guards, is_static)
    nodes: list = []
    entries: list = []  # see resolve_entry in mxnet_private/graphs.py
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
    heads = [resolve_entry(head, entries) for head in graph["heads"]]
    return from_nodes(symbol, graph, nodes, heads)


def guards_of(nodes: list, layers: set) -> dict:
    """Return {number of a guard of these layers: True if it is after a layer}."""
    found = {}
    for number, node in enumerate(nodes):
        before = node["inputs"][0][0] if node["inputs"] else -1
        if number in layers and _is_guard(nodes[before]):
            found[before] = False
        if before in layers and _is_guard(node):
            found[number] = True
    return found


def _is_guard(node):
    return node["op"] == "SliceChannel" and node["attrs"]["num_outputs"] == "1"


def _choose_guards(symbol, graph, guards, is_static):
    """Replace the guards of a graph by cheaper ones."""
    inferred = _infer(symbol, graph, list(guards))
    for (number, is_after), (ndim, dtype) in zip(guards.items(), inferred):
        if not is_after:
            # A Reshape of up to 4 dimensions copies only if it must.
            if 1 <= ndim <= 4:
                _replace(graph["nodes"][number], "Reshape", shape="(-2,)")
        elif not is_static:
            # The gradient of a transpose is another transpose, which always copies.
            if ndim == 4:
                _replace(graph["nodes"][number], "transpose", axes="(0, 1, 2, 3)")
        elif dtype == "float32":
            # A layer must not compute an output of a static_shape graph, so another
            # node follows it. A Reshape would be slower than amp_multicast, because it
            # copies gradients in blocked layouts.
            _replace(graph["nodes"][number], "amp_multicast", num_outputs="1")
        elif dtype is not None:  # only float32 gradients have blocked layouts
            _replace(graph["nodes"][number], "Reshape", shape="(-2,)")


def _replace(node, operator, **attributes):
    node.update(op=operator, attrs=attributes)


def _infer(symbol, graph, numbers):
    """Return the number of dimensions, or 0, and the dtype, or None, of each node."""
    block, inputs = current_build()
    if block is None or not numbers:
        return [(0, None)] * len(numbers)
    heads = [[number, 0, 0] for number in numbers]
    outputs = from_nodes(symbol, dict(graph), graph["nodes"], heads)
    # A later cast of a parameter p does not change p.var(), so dtypes are read from p.
    arrays = {p.var().name: p for p in block.collect_params().values()}
    arrays.update(inputs)
    known = [name for name in outputs.list_inputs() if name in arrays]
    dtypes = {name: np.dtype(arrays[name].dtype).type for name in known}
    shapes = {name: tuple(arrays[name].shape or ()) for name in known}
    least = 0 if mx.util.is_np_shape() else 1  # a size of 0 may mean unknown
    shapes = {name: s for name, s in shapes.items() if s and min(s) >= least}
    _, shapes_of_outputs, _ = outputs.infer_shape_partial(**shapes)
    _, types_of_outputs, _ = outputs.infer_type_partial(**dtypes)
    return [
        (len(shape or ()), None if dtype is None else np.dtype(dtype).name)
        for shape, dtype in zip(shapes_of_outputs, types_of_outputs)
    ]
