"""Exports of nets whose own graph is guarded for one mode or kind of device only.

It also refuses to write graphs with synchronized layers to ONNX, which has none.

Called by ``batch_norm.py`` in a trace. ``layout_guard.py`` guards a graph as far as
needed in the mode and on the contexts that it is traced for; native code refuses such a
graph in another process, which can run it in any way. So a trace for all ways is saved.
"""

from __future__ import annotations

import sys
from functools import partial, wraps

import mxnet as mx

from ..common.nested import flatten, rebuild
from . import layout_guard


def trace_again_for_export() -> None:
    """Lets the block whose trace is under way export a graph for all ways to run."""
    block, args = layout_guard.traced_block()
    args = rebuild(args, iter([_without_memory(leaf) for leaf in flatten(args)]))
    vars(block)["export"] = partial(_export, block, args)


def _without_memory(leaf):
    if not isinstance(leaf, mx.nd.NDArray):
        return leaf
    handle = mx.nd.ndarray._new_alloc_handle(leaf.shape, mx.cpu(), True, leaf.dtype)
    return type(leaf)(handle)


def _export(block, args, *arguments, **options):
    """Replaces `HybridBlock.export`."""
    graph, export = block._cached_graph, type(block).export
    if not graph:  # it says what is missing
        return export(block, *arguments, **options)
    block._cached_graph, layout_guard.exported = (), block
    try:
        block._get_graph(*args)
        return export(block, *arguments, **options)
    finally:
        block._cached_graph, layout_guard.exported = graph, None


def _refuse_onnx(graph):
    """Lets a class that makes ONNX graphs refuse symbols that ONNX has no node for.

    It would fail over a guard's operator, in words that do not name the layer.
    """
    create = graph.create_onnx_graph_proto

    @wraps(create)
    def checked(self, sym, *arguments, **options):
        nodes = sym.attr_dict().items() if isinstance(sym, mx.sym.Symbol) else []
        ours = [name for name, node in nodes if node.get("op_type") == "gluon_syncbn"]
        if ours:
            raise ValueError(
                f"ONNX has no synchronized batch normalization, but the graph has "
                f"'{ours[0]}': before the export call "
                "gluon_syncbn.revert_sync_batchnorm(net), and the net"
            )
        return create(self, sym, *arguments, **options)

    graph.create_onnx_graph_proto = checked


# Of MXNet since 1.9, and before.
for _name in (
    "mxnet.onnx.mx2onnx._export_onnx",
    "mxnet.contrib.onnx.mx2onnx.export_onnx",
):
    if hasattr(sys.modules.get(_name), "MXNetGraph"):
        _refuse_onnx(sys.modules[_name].MXNetGraph)
