"""The arrays that a backward through parallel nets writes gradients to.

It must not know in which order they are reached.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Sequence

import mxnet as mx
from mxnet import autograd

from ..layer.batch_norm import contexts_of
from ..mxnet_private import graphs
from ..mxnet_private.parameters import data_of, gradients_of, is_fresh, mark_fresh


class Destination:
    """The parameters' gradients in one backward call, which may reach one often.

    Each graph that reaches a parameter with ``grad_req='write'`` overwrites what
    another one (of another call of the net, or the caller's own) has written.
    """

    def __init__(self, calls: list, train_mode: bool) -> None:
        self._train_mode = train_mode
        # For each parameter of the nets that were called: its data and gradients on the
        # devices of these calls, by context, and whether gradients are overwritten.
        self._replicas = {
            (id(p), *call.devices.contexts): [
                (context, data, grad, p.grad_req == "write")
                for context, data, grad in zip(
                    contexts_of(p), data_of(p), gradients_of(p)
                )
                if context in call.devices.contexts
            ]
            for call in calls
            for p in call.batch.parameters
        }
        self._former = [data for _, data, *_ in self._all() if is_fresh(data)]
        for data in self._former:
            mark_fresh(data, False)

    def _all(self):
        replicas = itertools.chain.from_iterable(self._replicas.values())
        return {id(replica[1]): replica for replica in replicas}.values()

    @contextmanager
    def _adding(self, context):
        """In the block gradients are added to what earlier graphs wrote."""
        saved = []
        for on, data, grad, is_written in self._all():
            if is_written and context in (None, on) and is_fresh(data):
                saved.append((data, grad, grad.copy()))
                mark_fresh(data, False)
        yield
        for data, grad, earlier in saved:
            if is_fresh(data):
                grad += earlier
            mark_fresh(data)

    def differentiate(
        self,
        retain_graph: bool,
        context: mx.Context | None,
        heads: Sequence,
        gradients: Sequence,
        others: Sequence,
    ) -> list:
        """Differentiates one graph: a device's, or without `context` the caller's.

        Returns the gradients of other variables than parameters, as they are written.
        """
        for variable in others:
            mark_fresh(variable, False)
        with self._adding(context):
            graphs.differentiate(heads, gradients, (), retain_graph, self._train_mode)
        for variable in others:
            if not is_fresh(variable):  # these heads do not depend on it
                _contribute_nothing(variable, variable.grad, True)
        return [variable.grad for variable in others]

    def finish(self) -> None:
        """Sets gradients to zero on skipped devices, where the others have one."""
        for replicas in self._replicas.values():
            if any(is_fresh(data) for _, data, *_ in replicas):
                for _, data, grad, is_written in replicas:
                    if not is_fresh(data):
                        _contribute_nothing(data, grad, is_written)

    def restore(self) -> None:
        """Restores the marks of what this call, which may have failed, left alone."""
        for data in self._former:
            mark_fresh(data)


def _contribute_nothing(
    data: mx.nd.NDArray, grad: mx.nd.NDArray, is_written: bool
) -> None:
    """Makes a gradient that no backward will write ready for a Trainer.

    `is_written` is False for gradients that are added up, which stay as they are.
    """
    if is_written:
        with autograd.pause():
            grad[:] = 0
    mark_fresh(data)
