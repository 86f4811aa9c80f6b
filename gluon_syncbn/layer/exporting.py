"""Exports of nets whose own graph is guarded for one mode or kind of device only.

It also refuses to write graphs with synchronized layers to ONNX, which has none.

Called by ``batch_norm.py`` in a trace. ``layout_guard.py`` guards a graph as far as
needed in the mode and on the contexts that it is traced for; native code refuses such a
graph in another process, which can run it in any way. So a trace for all ways is saved.
"""

from __future__ import annotations

from functools import partial

import mxnet as mx

from ..common.nested import flatten, rebuild
from ..mxnet_private.blocks import Trace, has_graph, traced_again, without_memory
from ..mxnet_private.onnx import check_before_export


def trace_again_for_export(trace: Trace) -> None:
    """Lets the block that is traced export a graph for all ways to run."""
    args = list(trace.args)
    leaves = [_without_memory(leaf) for leaf in flatten(args)]
    args = rebuild(args, iter(leaves))
    vars(trace.block)["export"] = partial(_export, trace.block, args)


def _without_memory(leaf):
    return without_memory(leaf) if isinstance(leaf, mx.nd.NDArray) else leaf


def _export(block, args, *arguments, **options):
    """Replaces `HybridBlock.export`."""
    export = partial(type(block).export, block, *arguments, **options)
    if not has_graph(block):  # it says what is missing
        return export()
    with traced_again(block, args):
        return export()


def _refuse(symbol):
    """ValueError for a graph with the layer, as ONNX would name a guard's operator."""
    for name, node in symbol.attr_dict().items():
        if node.get("op_type") == "gluon_syncbn":
            raise ValueError(
                f"ONNX has no synchronized batch normalization, but the graph has "
                f"'{name}': before the export call "
                "gluon_syncbn.revert_sync_batchnorm(net), and the net"
            )


check_before_export(_refuse)
