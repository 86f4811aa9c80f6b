"""Backward through the caller's graph and then through the devices' graphs.

MXNet has no hook between these graphs, so this module replaces its backward (see
docs/design/mxnet.md). In the caller's graph, variables called cut leaves stand for the
devices' outputs. After backward every device has the gradients of the whole batch.
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
from .recorded_call import calls_behind


@lru_cache(maxsize=None)
def replace_backward() -> None:
    """Replace MXNet's backward for heads that depend on a net's recorded calls."""
    graphs.install_backward(_backward)


def _backward(backward):
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
    parameters = ParameterGradients(calls)
    with autograd.pause(), parameters.summed():
        heads = _run_calls(calls, leaves, backward, parameters)
    if not backward.retain_graph:
        # Graphs may share arrays, so freeing one graph alone could break another.
        graphs.drop(heads + [head for call in calls for head in call.heads])


def _check_head_gradients(backward):
    """Raise ValueError if a gradient does not fit its head. MXNet accepts any."""
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
    """Run backward through the caller's graph, and then through each call's graphs.

    The inputs of a call may depend on variables of the caller. If so, all gradients of
    such variables are written by one more backward through the caller's graph, from
    the heads and these inputs. Return the heads and these inputs.
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
    return heads


def _gradients_by_name(leaves, heads, gradients, train_mode):
    """Return the gradients of `leaves` by name, if heads depend on them."""
    names = graphs.variables_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    if not found:
        return {}
    variables = list(found.values())
    results = graphs.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))


class ParameterGradients:
    """The gradients of the called nets' parameters during one backward."""

    def __init__(self, calls: Iterable) -> None:
        split = {id(p) for call in calls if call.splits_batch for p in call.parameters}
        parameters = dict.fromkeys(p for call in calls for p in call.parameters)
        self._all = having_gradients(parameters)  # (parameter, pairs (array, gradient))
        self._summed = [
            (parameter, pairs)
            for parameter, pairs in self._all
            if id(parameter) in split and pairs[0][0].stype == "default"
        ]
        # {context: pairs (array, gradient)} with grad_req="write"
        self._overwritten: dict = collections.defaultdict(list)
        for parameter, pairs in self._all:
            if parameter.grad_req == "write":
                for data, grad in pairs:
                    self._overwritten[data.context].append((data, grad))

    @contextmanager
    def adding(self, contexts: Iterable[mx.Context] | None = None) -> Iterator[None]:
        """Make the ``with`` block add to gradients that earlier graphs have written."""
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
        """Sum over devices the gradients that the ``with`` block writes."""
        values = [data for _, pairs in self._all for data, _ in pairs]
        fresh_before = list(filter(is_fresh, values))
        added = [pairs for p, pairs in self._summed if p.grad_req == "add"]
        earlier = [(grad, grad.copy()) for pairs in added for _, grad in pairs]
        for grad, _ in earlier:
            grad[:] = 0
        mark_fresh(fresh_before, False)
        try:
            yield
            self._sum()
        finally:
            for grad, value in earlier:
                grad += value
            mark_fresh(fresh_before)

    def _sum(self):
        """Give all devices the sum of the gradients that devices have written."""
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
