"""Calls of a static_shape graph run in the order in which they were queued.

Imported for its effect on MXNet's blocks. MXNet takes the running statistics of such a
graph as only read, so nothing orders two calls with independent inputs on a device, and
devices could pair one's first call with another's second. It must not know layers.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Callable, Sequence

import mxnet as mx

from ..common.nested import flatten
from ..mxnet_private.blocks import graph_of, wrap_static_calls
from ..mxnet_private.library import observe_errors, push
from .library import load

_graphs = weakref.WeakKeyDictionary()  # by block: its graph, and whether it has layers
# By block and context: an array that is written when the block's latest call has ended.
_ended = weakref.WeakKeyDictionary()


def _in_order(block: mx.gluon.HybridBlock, args: Sequence, call: Callable) -> Any:
    """Makes the call; it begins when the former one on each input's context has ended.

    Devices run the calls of a net in one order, so this adds no circle of waits.
    """
    ended = _ended.setdefault(block, {})
    nothing = ctypes.cast(load().gluon_syncbn_do_nothing, ctypes.c_void_p)
    for x in _arrays(args):
        if x.context in ended:
            push(nothing, 0, x.context, [ended[x.context]], [x])
    outputs = call()
    if _has_layers(block):
        for y in _arrays([outputs]):
            if y.context not in ended:
                ended[y.context] = mx.nd.empty((1,), ctx=y.context)
            push(nothing, 0, y.context, [y], [ended[y.context]])
    return outputs


def _arrays(nested):
    leaves = flatten(list(nested))
    return [leaf for leaf in leaves if isinstance(leaf, mx.nd.NDArray)]


def _has_layers(block):
    graph = graph_of(block)
    known, has_layers = _graphs.get(block, (None, False))
    if known is not graph:
        nodes = graph.attr_dict().values()
        has_layers = any(node.get("op_type") == "gluon_syncbn" for node in nodes)
        _graphs[block] = graph, has_layers
    return has_layers


# What has failed would let all later calls fail, too: MXNet hands errors on.
observe_errors(lambda _text: _ended.clear())
wrap_static_calls(_in_order)
