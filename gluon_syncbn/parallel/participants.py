"""Training calls with fewer rows than devices, which skip the last devices."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private.parameters import data_of
from ..native.interrupts import DeferredSignals
from ..native.library import load


@contextmanager
def only_participants(
    layers: Sequence, contexts: Sequence[mx.Context]
) -> Iterator[None]:
    """Make SyncBatchNorm layers wait only for these contexts in training.

    The other contexts get the running statistics of `contexts[0]`. A layer reads its
    participants when its operator runs, so this function waits for pending work before
    and after the ``with`` block.
    """
    with DeferredSignals():
        try:
            mx.nd.waitall()
            for layer in layers:
                _set_participants(layer, contexts)
            yield
        finally:
            try:
                mx.nd.waitall()
            finally:
                # A layer that finished before an error has new statistics to copy.
                for layer in layers:
                    _set_participants(layer, [])
                for layer in layers:
                    _copy_running_statistics(layer, contexts)


def _set_participants(layer, contexts):
    load().gluon_syncbn_set_participants(layer._sync.key, " ".join(map(str, contexts)))


def _copy_running_statistics(layer, contexts):
    for parameter in (layer.running_mean, layer.running_var):
        arrays = {data.context: data for data in data_of(parameter)}
        with autograd.pause():
            for context, data in arrays.items():
                if context not in contexts:
                    arrays[contexts[0]].copyto(data)
