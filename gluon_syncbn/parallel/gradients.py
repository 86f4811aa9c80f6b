"""Gradients of parameters in a backward of several graphs, any of which may write them.

Each device computes its part of a gradient. After a parallel net's backward every
device has the sum, as if one device had had the whole batch.
"""

from __future__ import annotations

import collections
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private import graphs
from ..mxnet_private.library import add_n, to_context
from ..mxnet_private.parameters import (
    contexts_of,
    data_of,
    gradients_of,
    is_dense,
    is_fresh,
    mark_fresh,
    set_summed,
)


class Replica(NamedTuple):
    """A parameter on one device."""

    data: mx.nd.NDArray
    grad: mx.nd.NDArray
    is_overwritten: bool  # by each backward, as with grad_req="write"


class ParameterGradients:
    """The gradients of the nets that were called.

    Attributes
    ----------
    on : dict of list of Replica
        The replicas on each context.
    """

    def __init__(self, calls: Iterable) -> None:
        self._summed: list = []  # parameters of parallel nets, each with its replicas
        on: dict = collections.defaultdict(dict)
        parallel = {
            id(p) for call in calls if call.is_parallel for p in call.parameters
        }
        for parameter in dict.fromkeys(p for call in calls for p in call.parameters):
            pairs = zip(data_of(parameter), gradients_of(parameter))
            replicas = [Replica(*pair, parameter.grad_req == "write") for pair in pairs]
            for context, replica in zip(contexts_of(parameter), replicas):
                on[context][id(replica.data)] = replica
            if id(parameter) in parallel and is_dense(parameter) and replicas:
                self._summed.append((parameter, replicas))
        self.on = {context: list(found.values()) for context, found in on.items()}

    def adding(self, contexts: Iterable[mx.Context] | None = None) -> Any:
        """Add one graph's gradients to those of earlier graphs, on some contexts."""
        lists = self.on if contexts is None else contexts
        return _adding([r for context in lists for r in self.on.get(context, ())])

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum the gradients that the block writes over devices, at its end.

        Gradients that the block leaves alone keep their values and marks, also after a
        failure. With grad_req="add" the sum is added to what was there before.
        """
        replicas = sum(self.on.values(), [])
        former = [data for data, *_ in replicas if is_fresh(data)]
        accumulated = [
            (grad, grad.copy())
            for _, replicas in self._summed
            for _, grad, is_overwritten in replicas
            if not is_overwritten
        ]
        for grad, _ in accumulated:
            grad[:] = 0
        for data in former:
            mark_fresh(data, False)
        try:
            yield
            for parameter, replicas in self._summed:
                if _sum(replicas):
                    set_summed(parameter, True)
        finally:
            for grad, earlier in accumulated:
                grad += earlier
            for data in former:
                mark_fresh(data)


def _sum(replicas):
    """Write the sum over the devices that have a gradient to all; False if none has."""
    parts = [grad for data, grad, _ in replicas if is_fresh(data)]
    if not parts:
        return False
    context = parts[0].context
    if len(parts) > 1 and parts[0].stype == "default":
        add_n(*(_on(grad, context) for grad in parts), out=_on(parts[0], context))
    elif len(parts) > 1:
        mx.nd.add_n(*(grad.as_in_context(context) for grad in parts)).copyto(parts[0])
    for data, grad, _ in replicas:
        if grad is not parts[0]:
            parts[0].copyto(grad)
        mark_fresh(data)
    return True


def _on(grad, context):
    return to_context(grad, context).as_nd_ndarray()


@contextmanager
def _adding(replicas):
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
    heads: Sequence, gradients: Sequence, variables: Sequence, train_mode: bool
) -> list[Any]:
    """Write a graph's gradients; return those of `variables`, zeros without any.

    The graph is retained. `graphs.differentiate` with variables would write no others.
    """
    for variable in variables:
        mark_fresh(variable, False)
    graphs.differentiate(heads, gradients, (), True, train_mode)
    for variable in variables:
        if not is_fresh(variable):  # these heads do not depend on it
            with autograd.pause():
                variable.grad[:] = 0
            mark_fresh(variable)
    return [variable.grad for variable in variables]
