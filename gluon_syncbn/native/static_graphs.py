"""Tells MXNet's engine that static_shape graphs write running statistics.

MXNet takes them as only read there: nothing would order two calls with independent
inputs on a device, and devices could pair one's first call with another's second. It
must not know layers.

Every block may run such a graph, so the class of graphs is replaced, with the first
layer that is traced: GluonCV makes SymbolBlocks of a layer's symbols, and these are
traced without the layer.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Iterator, Sequence

import mxnet as mx

from ..common.nested import arrays_in
from ..mxnet_private.library import push
from .library import load


@contextmanager
def call_guarded(guard: str) -> Iterator[None]:
    """Allow calls of graphs of this guard in the ``with`` block."""
    load().gluon_syncbn_call_guarded(guard, True)
    try:
        yield
    finally:
        load().gluon_syncbn_call_guarded(guard, False)


@lru_cache(maxsize=None)
def order_calls() -> None:
    """Orders the calls of static_shape graphs that write statistics of our layers."""

    class CachedOp(mx.nd.CachedOp):
        def __init__(self, graph: Any, flags: Sequence = ()) -> None:
            super().__init__(graph, flags)
            self._statistics: list = []  # their places among the inputs
            if dict(flags).get("static_shape") and "gluon_syncbn" in graph.tojson():
                written = set(graph.list_auxiliary_states())
                names = enumerate(graph.list_inputs())
                self._statistics = [k for k, name in names if name in written]

        def __call__(self, *inputs: Any, **options: Any) -> Any:
            written = [inputs[k] for k in self._statistics]
            if not written:
                return super().__call__(*inputs, **options)
            with call_guarded("static_shape"):
                outputs = super().__call__(*inputs, **options)
            # What uses the statistics later waits for the end of the call.
            end, context = load().gluon_syncbn_do_nothing, written[0].context
            push(end, 0, context, arrays_in(outputs), written)
            return outputs

    mx.nd.CachedOp = CachedOp
