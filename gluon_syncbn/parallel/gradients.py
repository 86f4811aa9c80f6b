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
from ..mxnet_private.arrays import sum_into_first
from ..mxnet_private.parameters import (
    is_fresh,
    mark_fresh,
    set_summed,
    with_gradients,
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
        self.on: dict = collections.defaultdict(list)
        parallel = {
            id(p) for call in calls if call.is_parallel for p in call.parameters
        }
        known = set()  # arrays; parameters may share them
        parameters = dict.fromkeys(p for call in calls for p in call.parameters)
        for parameter, pairs in with_gradients(parameters):
            is_overwritten = parameter.grad_req == "write"
            replicas = [Replica(data, grad, is_overwritten) for data, grad in pairs]
            for replica in replicas:
                if id(replica.data) not in known:
                    known.add(id(replica.data))
                    self.on[replica.data.context].append(replica)
            if id(parameter) in parallel and replicas[0].data.stype == "default":
                self._summed.append((parameter, replicas))

    @contextmanager
    def adding(self, contexts: Iterable[mx.Context] | None = None) -> Iterator[None]:
        """Add one graph's gradients to those of earlier graphs, on some contexts."""
        saved = [
            (data, grad, grad.copy())
            for context in (list(self.on) if contexts is None else contexts)
            for data, grad, is_overwritten in self.on.get(context, ())
            if is_overwritten and is_fresh(data)
        ]
        for data, *_ in saved:
            mark_fresh([data], False)
        yield
        for data, grad, earlier in saved:
            if is_fresh(data):
                grad += earlier
            mark_fresh([data])

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
        mark_fresh(former, False)
        try:
            yield
            self._sum()
        finally:
            for grad, earlier in accumulated:
                grad += earlier
            mark_fresh(former)

    def _sum(self):
        """Write the sum over the devices that have a gradient to all devices."""
        summed, dense = [], []
        for parameter, replicas in self._summed:
            parts = [grad for data, grad, _ in replicas if is_fresh(data)]
            if not parts:
                continue
            summed.append((parameter, replicas, parts))
            if parts[0].stype == "default":
                dense.append(parts)
            elif len(parts) > 1:
                context = parts[0].context
                copies = [grad.as_in_context(context) for grad in parts]
                mx.nd.add_n(*copies).copyto(parts[0])
        sum_into_first(dense)
        for _, replicas, parts in summed:
            for _, grad, _ in replicas:
                if grad is not parts[0]:
                    parts[0].copyto(grad)
        mark_fresh(data for _, replicas, _ in summed for data, *_ in replicas)
        set_summed((parameter for parameter, *_ in summed), True)


def write_gradients(
    heads: Sequence, gradients: Sequence, variables: Sequence, train_mode: bool
) -> list[Any]:
    """Write a graph's gradients; return those of `variables`, zeros without any.

    The graph is retained. `graphs.differentiate` with variables would write no others.
    """
    if variables:
        mark_fresh(variables, False)
    graphs.differentiate(heads, gradients, (), True, train_mode)
    for variable in variables:
        if not is_fresh(variable):  # these heads do not depend on it
            with autograd.pause():
                variable.grad[:] = 0
            mark_fresh([variable])
    return [variable.grad for variable in variables]
