"""Gradients of a parallel net: from one loss on one device back to all devices.

MXNet has no hook between the caller's graph and the devices' graphs, so its function
for backward is replaced; docs/design/mxnet.md says why.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from mxnet import autograd

from ..mxnet_private import graphs
from .gradients import ParameterGradients, write_gradients
from .recorded_call import any_recorded, calls_before


@lru_cache(maxsize=None)
def replace_backward() -> None:
    """Replace MXNet's backward; its own runs while no net's graph is cut."""
    graphs.replace_backward(_backward, any_recorded)


def _backward(backward):
    """Run MXNet's backward, and that of the calls that its heads depend on.

    Graphs of several nets, and of several threads, stay apart.
    """
    calls, names = calls_before(backward.heads)
    if not calls:
        backward.run()
        return
    if backward.is_grad:
        raise ValueError(
            "autograd.grad was called with heads that depend on a parallel net, or on "
            "one of allow_plain_loop, expected attach_grad of the variables before the "
            "net is called, and backward, which writes to their attribute grad"
        )
    _check_head_gradients(backward)
    leaves = {n: leaf for call in calls for n, leaf in call.cut_leaves.items()}
    leaves = {n: leaf for n, leaf in leaves.items() if n in names}
    parameters, is_kept = ParameterGradients(calls), False
    try:
        with autograd.pause(), parameters.summed():
            _follow_calls(calls, leaves, backward, parameters)
        is_kept = backward.retain_graph
        if not is_kept:
            # Graphs may share an array without a gradient, so none is dropped before.
            cut = [head for call in calls for head in call.inputs + call.heads]
            graphs.drop(backward.heads + cut)
    finally:
        if not is_kept:
            for call in calls:
                call.release()


def _check_head_gradients(backward):
    """ValueError if a gradient does not fit its head.

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
                f"the gradient of head {number} has {given}, expected {expected} as "
                "the head has"
            )


def _follow_calls(calls, leaves, backward, parameters):
    """Differentiate the caller's graph for the cut leaves, then call by call.

    Where inputs of calls have gradients, the caller's own variables behind them are
    written last, from the heads and all inputs.
    """
    heads, gradients, mode = backward.heads, backward.gradients, backward.train_mode
    has_inputs = any(call.inputs for call in calls)
    if has_inputs:
        cut_gradients = _gradients_of(leaves, heads, gradients, mode)
    else:
        with parameters.adding():
            found = write_gradients(heads, gradients, list(leaves.values()), mode)
        cut_gradients = dict(zip(leaves, found))
    for call in calls:
        found = call.backward(cut_gradients, parameters.adding, mode)
        if found:
            behind = _gradients_of(leaves, call.inputs, found, mode)
            for name, gradient in behind.items():
                if name in cut_gradients:
                    gradient = cut_gradients[name] + gradient
                cut_gradients[name] = gradient
            heads, gradients = heads + call.inputs, gradients + found
    if has_inputs:
        with parameters.adding():
            write_gradients(heads, gradients, (), mode)


def _gradients_of(leaves, heads, gradients, train_mode):
    """Return the gradients of the leaves that heads depend on, by name."""
    names = graphs.names_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    if not found:
        return {}
    variables = list(found.values())
    results = graphs.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))
