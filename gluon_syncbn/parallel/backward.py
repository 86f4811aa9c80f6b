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
from typing import Iterable, Iterator

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
from .recorded_call import any_recorded, calls_behind


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
    leaves = {
        name: leaf
        for call in calls
        for name, leaf in call.cut_leaves.items()
        if name in names
    }
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
        graphs.differentiate(heads, gradients, (), True, mode)
        cut_gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for call in calls:
        inputs, found = call.backward(cut_gradients, parameters.adding, mode)
        if inputs:
            behind = _gradients_by_name(leaves, inputs, found, mode)
            for name, gradient in behind.items():
                if name in cut_gradients:
                    gradient = cut_gradients[name] + gradient
                cut_gradients[name] = gradient
            heads, gradients = heads + inputs, gradients + found
    if has_inputs:
        with parameters.adding():
            graphs.differentiate(heads, gradients, (), True, mode)


def _gradients_by_name(leaves, heads, gradients, train_mode):
    """Return the gradients of the leaves that heads depend on."""
    names = graphs.variables_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    if not found:
        return {}
    variables = list(found.values())
    results = graphs.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))


class ParameterGradients:
    """The gradients of the nets that were called, which several graphs may write."""

    def __init__(self, calls: Iterable) -> None:
        split = {id(p) for call in calls if call.splits_batch for p in call.parameters}
        self._values: list = []  # the parameters' arrays
        self._summed: list = []  # parameters of parallel nets, with (array, gradient)s
        self._accumulated: list = []  # gradients of these with grad_req="add"
        # (array, gradient)s with grad_req="write" by context; each backward overwrites.
        self._overwritten: dict = collections.defaultdict(list)
        parameters = dict.fromkeys(p for call in calls for p in call.parameters)
        for parameter, pairs in having_gradients(parameters):
            is_summed = id(parameter) in split and pairs[0][0].stype == "default"
            if is_summed:
                self._summed.append((parameter, pairs))
            for data, grad in pairs:
                self._values.append(data)
                if parameter.grad_req == "write":
                    self._overwritten[data.context].append((data, grad))
                elif is_summed:
                    self._accumulated.append(grad)

    @contextmanager
    def adding(self, contexts: Iterable[mx.Context] | None = None) -> Iterator[None]:
        """Add one graph's gradients to earlier graphs' gradients, on some contexts."""
        saved = [
            (data, grad, grad.copy())
            for context in (list(self._overwritten) if contexts is None else contexts)
            for data, grad in self._overwritten[context]
            if is_fresh(data)
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
        previous = list(filter(is_fresh, self._values))
        earlier = [grad.copy() for grad in self._accumulated]
        for grad in self._accumulated:
            grad[:] = 0
        mark_fresh(previous, False)
        try:
            yield
            self._sum()
        finally:
            for grad, value in zip(self._accumulated, earlier):
                grad += value
            mark_fresh(previous)

    def _sum(self):
        """Write the sum over the devices that have a gradient to all devices."""
        found = [
            (parameter, pairs, [grad for data, grad in pairs if is_fresh(data)])
            for parameter, pairs in self._summed
        ]
        found = [(p, pairs, parts) for p, pairs, parts in found if parts]
        sum_into_first(parts for *_, parts in found)
        for _, pairs, (total, *_) in found:
            for _, grad in pairs:
                if grad is not total:
                    total.copyto(grad)
        mark_fresh(data for _, pairs, _ in found for data, _ in pairs)
        set_summed((parameter for parameter, *_ in found), True)
