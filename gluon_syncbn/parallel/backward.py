"""Backward of parallel nets: from one loss on one device back to all devices.

MXNet has no hook between the caller's graph and the devices' graphs, so this module
replaces MXNet's function for backward; docs/design/mxnet.md explains why.

Each device computes its part of a gradient. After a parallel net's backward every
device has the sum, as if one device had had the whole batch.
"""

from __future__ import annotations

import collections
from contextlib import contextmanager
from functools import lru_cache
from typing import Iterable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..mxnet_private import graphs
from ..mxnet_private.arrays import sum_into_first
from ..mxnet_private.parameters import (
    having_gradients,
    is_fresh,
    mark_fresh,
    set_summed,
)
from .recorded_call import any_recorded, calls_behind, write_gradients


@lru_cache(maxsize=None)
def replace_backward() -> None:
    """Replace MXNet's backward, which still runs for graphs without a call of a net."""
    graphs.install_backward(_backward, any_recorded)


def _backward(backward):
    """Run MXNet's backward, then the backward of the calls that its heads depend on.

    Calls that no head depends on, also other threads' calls, are left alone.
    """
    calls, names = calls_behind(backward.heads)
    if not calls:
        backward.run()
        return
    if backward.is_grad:
        raise ValueError(
            "the heads of autograd.grad must not depend on a net of make_parallel or "
            "allow_plain_loop. Call attach_grad of the variables before the net is "
            "called, then backward, and read their attribute grad."
        )
    _check_head_gradients(backward)
    leaves = {n: leaf for call in calls for n, leaf in call.cut_leaves.items()}
    leaves = {n: leaf for n, leaf in leaves.items() if n in names}
    parameters, is_kept = ParameterGradients(calls), False
    try:
        with autograd.pause(), parameters.summed():
            _run_calls(calls, leaves, backward, parameters)
        is_kept = backward.retain_graph
        if not is_kept:
            # Freeing one graph breaks others that share an array without a gradient.
            cut = [head for call in calls for head in call.inputs + call.heads]
            graphs.drop(backward.heads + cut)
    finally:
        if not is_kept:
            for call in calls:
                call.release()


def _check_head_gradients(backward):
    """Raise ValueError if a gradient does not fit its head.

    MXNet notices another dtype when it computes, and another shape never.
    """
    for number, pair in enumerate(zip(backward.heads, backward.gradients)):
        if pair[1] is None:
            continue
        expected, given = (
            f"shape {array.shape} and dtype {np.dtype(array.dtype)}" for array in pair
        )
        if given != expected:
            raise ValueError(
                f"the gradient of head {number} must have {expected} like the head, "
                f"got {given}"
            )


def _run_calls(calls, leaves, backward, parameters):
    """Run backward through the caller's graph to the cut leaves, then call by call.

    If inputs of calls have gradients, the caller's own variables behind them are
    written last, from the heads and all inputs.
    """
    heads, gradients, mode = backward.heads, backward.gradients, backward.train_mode
    has_inputs = any(call.inputs for call in calls)
    if has_inputs:
        cut_gradients = _gradients_by_name(leaves, heads, gradients, mode)
    else:
        with parameters.adding():
            found = write_gradients(heads, gradients, list(leaves.values()), mode)
        cut_gradients = dict(zip(leaves, found))
    for call in calls:
        found = call.backward(cut_gradients, parameters.adding, mode)
        if found:
            behind = _gradients_by_name(leaves, call.inputs, found, mode)
            for name, gradient in behind.items():
                if name in cut_gradients:
                    gradient = cut_gradients[name] + gradient
                cut_gradients[name] = gradient
            heads, gradients = heads + call.inputs, gradients + found
    if has_inputs:
        with parameters.adding():
            write_gradients(heads, gradients, (), mode)


def _gradients_by_name(leaves, heads, gradients, train_mode):
    """Return the gradients of the leaves that heads depend on."""
    names = graphs.variables_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    if not found:
        return {}
    variables = list(found.values())
    results = graphs.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))


class Replica(NamedTuple):
    """A parameter on one device."""

    data: mx.nd.NDArray
    grad: mx.nd.NDArray
    is_overwritten: bool  # each backward overwrites it, as with grad_req="write"


class ParameterGradients:
    """The gradients of the nets that were called, which several graphs may write."""

    def __init__(self, calls: Iterable) -> None:
        self._summed: list = []  # parameters of parallel nets, each with its replicas
        self._replicas: dict = collections.defaultdict(list)  # lists by context
        split = {id(p) for call in calls if call.splits_batch for p in call.parameters}
        known = set()  # arrays; parameters may share them
        parameters = dict.fromkeys(p for call in calls for p in call.parameters)
        for parameter, pairs in having_gradients(parameters):
            is_overwritten = parameter.grad_req == "write"
            replicas = [Replica(data, grad, is_overwritten) for data, grad in pairs]
            for replica in replicas:
                if id(replica.data) not in known:
                    known.add(id(replica.data))
                    self._replicas[replica.data.context].append(replica)
            if id(parameter) in split and replicas[0].data.stype == "default":
                self._summed.append((parameter, replicas))

    @contextmanager
    def adding(self, contexts: Iterable[mx.Context] | None = None) -> Iterator[None]:
        """Add one graph's gradients to earlier graphs' gradients, on some contexts."""
        saved = [
            (data, grad, grad.copy())
            for context in (list(self._replicas) if contexts is None else contexts)
            for data, grad, is_overwritten in self._replicas.get(context, ())
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
        """Sum over devices the gradients that the ``with`` block writes, at its end.

        Other gradients keep their values and marks, also after a failure.
        With grad_req="add" the sum is added to the earlier value.
        """
        replicas = sum(self._replicas.values(), [])
        previous = [data for data, *_ in replicas if is_fresh(data)]
        accumulated = [
            (grad, grad.copy())
            for _, replicas in self._summed
            for _, grad, is_overwritten in replicas
            if not is_overwritten
        ]
        for grad, _ in accumulated:
            grad[:] = 0
        mark_fresh(previous, False)
        try:
            yield
            self._sum()
        finally:
            for grad, earlier in accumulated:
                grad += earlier
            mark_fresh(previous)

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
