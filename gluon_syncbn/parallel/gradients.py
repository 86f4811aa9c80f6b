"""Gradients of parameters in a backward of several graphs, any of which may write them.

It must not know which graphs these are, nor their order.
"""

from __future__ import annotations

import collections
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private import graphs
from ..mxnet_private.parameters import (
    contexts_of,
    data_of,
    gradients_of,
    is_fresh,
    mark_fresh,
)


class Replica(NamedTuple):
    """A parameter on one device."""

    data: mx.nd.NDArray
    grad: mx.nd.NDArray
    is_overwritten: bool  # by each backward, as with grad_req="write"


class ParameterGradients:
    """The gradients of the nets that were called, on the devices of their calls.

    Attributes
    ----------
    everywhere : list of Replica
    on : dict of list of Replica
        By context.
    """

    def __init__(self, calls: Iterable) -> None:
        found = {(p, *call.devices.contexts) for call in calls for p in call.parameters}
        self._parameters = [
            {
                context: Replica(data, grad, parameter.grad_req == "write")
                for context, data, grad in zip(
                    contexts_of(parameter), data_of(parameter), gradients_of(parameter)
                )
                if context in contexts
            }
            for parameter, *contexts in found
        ]
        on: dict = collections.defaultdict(dict)
        for replicas in self._parameters:
            for context, replica in replicas.items():
                on[context][id(replica.data)] = replica
        self.on = {context: list(found.values()) for context, found in on.items()}
        self.everywhere = sum(self.on.values(), [])

    @contextmanager
    def to_be_written(self) -> Iterator[None]:
        """In the block a mark tells which gradients this backward has written.

        Afterwards, also after a failure, those that it has left alone are marked as
        they were; but devices that had no row get zeros where the others have a
        gradient.
        """
        former = [data for data, *_ in self.everywhere if is_fresh(data)]
        for data in former:
            mark_fresh(data, False)
        try:
            yield
            for replicas in self._parameters:
                self._zero_skipped(list(replicas.values()))
        finally:
            for data in former:
                mark_fresh(data)

    @staticmethod
    def _zero_skipped(replicas):
        if any(is_fresh(data) for data, *_ in replicas):
            for data, grad, is_overwritten in replicas:
                if not is_fresh(data):
                    if is_overwritten:
                        _set_zero(grad)
                    mark_fresh(data)


@contextmanager
def adding(replicas: Iterable[Replica]) -> Iterator[None]:
    """In the block one graph's gradients are added to those of earlier ones."""
    saved = []
    for data, grad, is_overwritten in replicas:
        if is_overwritten and is_fresh(data):
            saved.append((data, grad, grad.copy()))
            mark_fresh(data, False)
    yield
    for data, grad, earlier in saved:
        if is_fresh(data):
            grad += earlier
        mark_fresh(data)


def differentiate(
    heads: Sequence,
    gradients: Sequence,
    variables: Sequence,
    retain_graph: bool,
    train_mode: bool,
) -> list[Any]:
    """Writes a graph's gradients; returns those of `variables`, zeros without any.

    `graphs.differentiate` with variables would write no others.
    """
    for variable in variables:
        mark_fresh(variable, False)
    graphs.differentiate(heads, gradients, (), retain_graph, train_mode)
    for variable in variables:
        if not is_fresh(variable):  # these heads do not depend on it
            _set_zero(variable.grad)
            mark_fresh(variable)
    return [variable.grad for variable in variables]


def _set_zero(grad):
    with autograd.pause():
        grad[:] = 0
