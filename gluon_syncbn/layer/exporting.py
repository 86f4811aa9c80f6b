"""Exports of nets whose own graph is guarded for one mode or kind of device only.

Called by ``batch_norm.py`` in a trace. Another process can run a graph in any way, so a
trace for all ways is saved. Exports to ONNX, which has no such layer, are refused. It
must not know how a guard works.
"""

from __future__ import annotations

from functools import partial

import mxnet as mx

from ..common.nested import flatten, rebuild
from ..mxnet_private.blocks import Trace, has_graph, traced_again, without_memory
from ..mxnet_private.onnx import check_before_export


def trace_again_for_export(trace: Trace) -> None:
    """Lets the block that is traced export a graph for all ways to run."""
    leaves = [
        without_memory(leaf) if isinstance(leaf, mx.nd.NDArray) else leaf
        for leaf in flatten(list(trace.args))
    ]
    args = rebuild(list(trace.args), iter(leaves))
    vars(trace.block)["export"] = partial(_export, trace.block, args)


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
