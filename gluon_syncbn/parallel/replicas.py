"""Running statistics in calls that skip devices, or must not change statistics."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private.parameters import data_of, is_deferred, when_initialized
from ..native.interrupts import DeferredSignals
from ..native.library import load


@contextmanager
def unchanged(parameters: Sequence) -> Iterator[None]:
    """Restore running statistics after the ``with`` block."""
    saved = []

    def save(parameter):
        saved.extend((data, data.copy()) for data in data_of(parameter))

    for parameter in parameters:
        if parameter.grad_req == "null":
            save(parameter)
            if is_deferred(parameter):
                when_initialized(parameter, partial(save, parameter))
    try:
        yield
    finally:
        with autograd.pause():
            for data, value in saved:
                value.copyto(data)


@contextmanager
def only_participants(
    layers: Sequence, contexts: Sequence[mx.Context], is_isolated: bool = False
) -> Iterator[None]:
    """Make SyncBatchNorm layers wait only for these contexts in training.

    The other contexts get the running statistics of `contexts[0]`. If `is_isolated`,
    the layers ignore other processes. A layer reads both settings when its operator
    runs, so this function waits for pending work before and after the ``with`` block.
    """
    with DeferredSignals():
        try:
            mx.nd.waitall()
            for layer in layers:
                _set_participants(layer, contexts, is_isolated)
            yield
        finally:
            try:
                mx.nd.waitall()
            finally:
                # A layer that finished before an error has new statistics to copy.
                for layer in layers:
                    _set_participants(layer, [], False)
                for layer in layers:
                    _copy_running_statistics(layer, contexts)


def _set_participants(layer, contexts, is_isolated):
    load().gluon_syncbn_set_participants(layer.key, " ".join(map(str, contexts)))
    layer._sync.isolate(is_isolated)


def _copy_running_statistics(layer, contexts):
    for parameter in (layer.running_mean, layer.running_var):
        arrays = {data.context: data for data in data_of(parameter)}
        with autograd.pause():
            for context, data in arrays.items():
                if context not in contexts:
                    arrays[contexts[0]].copyto(data)
