"""Steps in which only some of the devices hold a shard.

Here the change is ordered against work in flight; it must not know the exchange
(``src/exchange/table.cc``).
"""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from typing import ContextManager, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from ..common.arguments import check_block, check_contexts, comma_list
from ..layer.finding import synchronized_layers
from ..mxnet_private.parameters import data_of
from ..native.failures import here
from ..native.interrupts import ALL_WAIT, DeferredSignals
from ..native.library import load

_changes = 0  # how often other contexts have become those that call a net


def changes() -> int:
    """Grows whenever nothing of any net is in flight, as contexts change."""
    return _changes


def participating(
    net: mx.gluon.Block, contexts: Sequence[mx.Context]
) -> ContextManager[None]:
    """In the ``with`` block only these contexts call the net in training.

    For a batch that is smaller than the number of devices. Every SyncBatchNorm of the
    net normalizes over the shards of these contexts. On leaving, the others get the
    running statistics of the first of them, so that these stay equal everywhere. A
    backward call may follow later: it waits for the contexts of its forward call.

    Entering and leaving wait for all work in flight (``mx.nd.waitall``), because a
    device that is still busy with an earlier step belongs to that one's devices.

    The gradients of skipped contexts are those of an earlier step: set them to zero
    before a Trainer sums them up. :func:`make_parallel` does all of this itself.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Its SyncBatchNorm layers, itself included, synchronize over `contexts` only.
    contexts : list of mxnet.Context
        Some of the contexts that the net is initialized on, at least one.

    Raises
    ------
    ValueError
        If `contexts` is empty, names one twice, or one that a layer is not on.
    TypeError
        If `net` is no Block, or `contexts` holds something else than contexts.

    Examples
    --------
    >>> from gluon_syncbn import Devices, SyncBatchNorm, participating
    >>> import mxnet as mx
    >>> layer = SyncBatchNorm()
    >>> devices = Devices([mx.cpu(0), mx.cpu(1)])
    >>> layer.initialize(ctx=devices.contexts)
    >>> x = mx.nd.array([[0.0], [2.0]])
    >>> with mx.autograd.train_mode(), participating(layer, [mx.cpu(0)]):
    ...     y = layer(x)
    >>> [round(float(v), 4) for v in y.asnumpy()[:, 0]]
    [-1.0, 1.0]
    """
    contexts = check_contexts("contexts", contexts)
    layers = synchronized_layers(check_block("net", net))
    for context, layer in itertools.product(contexts, layers):
        expected = layer.contexts()
        if expected and context not in expected:
            raise ValueError(
                f"contexts names {context}, but SyncBatchNorm '{layer.name}' is "
                f"initialized on {comma_list(expected)}"
            )
    return calling(layers, contexts, levels_statistics=True)


@contextmanager
def calling(
    layers: Sequence, contexts: Sequence[mx.Context], levels_statistics: bool = False
) -> Iterator[None]:
    """As `participating`, for some layers; it may leave running statistics unequal."""
    global _changes
    # An exception of a handler would come between two layers, or before the first line
    # of __exit__. A second Ctrl-C reaches the block, and the first one its maps.
    with DeferredSignals() as section:
        try:
            mx.nd.waitall()
            for layer in layers:
                _set_participants(layer, contexts)
            here.participants = contexts
            section.limits = 1, math.inf
            yield
        finally:
            section.limits, here.participants = ALL_WAIT, ()
            try:
                mx.nd.waitall()
            finally:
                _changes += 1
                # After a failure too: other layers may have finished their step.
                for layer in layers:
                    _set_participants(layer, [])
                    if levels_statistics:
                        _copy_running_statistics(layer, contexts)


def _set_participants(layer, contexts):
    load().gluon_syncbn_set_participants(layer.key, " ".join(map(str, contexts)))


def _copy_running_statistics(layer, contexts):
    """Copy those of the first active context to the skipped ones."""
    for parameter in (layer.running_mean, layer.running_var):
        for data in data_of(parameter):  # none, if the net has no shapes yet
            if data.context not in contexts:
                with autograd.pause():
                    parameter.data(contexts[0]).copyto(data)
