"""Exports of nets whose own graph is guarded for one mode or kind of device only.

Called by ``batch_norm.py`` in a trace. ``layout_guard.py`` guards a graph as far as
needed in the mode and on the contexts that it is traced for; native code refuses such a
graph in another process, which can run it in any way. So a trace for all ways is saved.
"""

from __future__ import annotations

from functools import partial

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
