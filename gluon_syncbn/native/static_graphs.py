"""Tells MXNet's engine that static_shape graphs write running statistics.

MXNet takes them as only read there: nothing
would order two calls with independent inputs on a device, and devices could pair one's
first call with another's second. It must not know layers.

Every block may run such a graph, so the class's method is replaced, with the first
layer that is traced: GluonCV makes SymbolBlocks of a layer's symbols, and these are
traced without the layer.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, Callable, Sequence

import mxnet as mx

from ..common.nested import arrays_in
from ..mxnet_private.blocks import graph_of, wrap_static_calls
from ..mxnet_private.library import push
from ..mxnet_private.parameters import data_of
from .library import load

_written = weakref.WeakKeyDictionary()  # by block: its graph, and what that writes


def _note_writes(block: mx.gluon.HybridBlock, call: Callable) -> Any:
    """Makes the call; what uses its statistics later waits for its end."""
    outputs = call()
    arrays, parameters = arrays_in(outputs), _statistics(block)
    for context in {y.context for y in arrays} if parameters else ():
        written = [data for p in parameters for data in data_of(p)]
        written = [data for data in written if data.context == context]
        read = [y for y in arrays if y.context == context]
        push(load().gluon_syncbn_do_nothing, 0, context, read, written)
    return outputs


def _statistics(block: mx.gluon.HybridBlock) -> Sequence:
    """The parameters that the block's graph writes."""
    graph = graph_of(block)
    known, parameters = _written.get(block, (None, ()))
    if known is not graph:
        names = set(graph.list_auxiliary_states())
        found = block.collect_params().items()
        # Weak: they refer to their trainer, whose kvstore has to end before MXNet does.
        parameters = [weakref.ref(p) for name, p in found if name in names]
        _written[block] = graph, parameters
    return [parameter() for parameter in parameters]


@lru_cache(maxsize=None)
def order_calls() -> None:
    """Orders the calls of all blocks' static_shape graphs that write statistics."""
    wrap_static_calls(_note_writes)
