"""Backward through the caller's graph and then through the devices' graphs.

MXNet has no hook between these graphs, so `run_backward` replaces its backward (see
docs/design/mxnet.md). In the caller's graph, variables called cut leaves stand for the
devices' outputs. Gradients of the devices' graphs go to private arrays, whose sum over
devices is written once.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from mxnet import autograd

from ..mxnet_private import tape
from ..mxnet_private.owners import write_gradients
from .recorded_call import calls_behind


def run_backward(backward: tape.BackwardCall) -> None:
    """Run MXNet's backward, and the devices' if the heads depend on recorded calls."""
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
    with autograd.pause():
        heads, found = _run_calls(calls, leaves, backward)
        _write(found, tape.variables_behind(heads))
    if not backward.retain_graph:
        # Graphs may share arrays, so freeing one graph alone could break another.
        tape.free_graphs(heads + [head for call in calls for head in call.heads])


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


def _run_calls(calls, leaves, backward):
    """Run backward through the caller's graph, and then through each call's graphs.

    The inputs of a call may depend on variables of the caller. If so, all gradients of
    such variables are written by one more backward through the caller's graph, from
    the heads and these inputs. Return the heads and these inputs, and for each gradient
    (call, variable, index of the gradient, arrays whose sum it is).
    """
    heads, gradients, mode = backward.heads, backward.gradients, backward.train_mode
    has_inputs, parts = any(call.inputs for call in calls), {}
    if has_inputs:
        cut_gradients = _gradients_by_name(leaves, heads, gradients, mode)
    else:
        tape.differentiate(heads, gradients, (), True, mode)
        cut_gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for call in calls:
        pairs, inputs, dxs = call.backward(cut_gradients, mode)
        for variable, gradient in pairs:
            index = 0 if call.splits_batch and variable.is_owned else variable.place
            key = id(variable.gradients), index
            parts.setdefault(key, (call, variable, index, []))[-1].append(gradient)
        if inputs:
            behind = _gradients_by_name(leaves, inputs, dxs, mode)
            for name, gradient in behind.items():
                if name in cut_gradients:
                    gradient = cut_gradients[name] + gradient
                cut_gradients[name] = gradient
            heads, gradients = heads + inputs, gradients + dxs
    if has_inputs:
        tape.differentiate(heads, gradients, (), True, mode)
    return heads, parts.values()


def _write(found, names):
    """Write the gradients of `_run_calls`; see `write_gradients`."""
    by_devices: dict = {}  # {devices of a plain loop, or None: items}
    for call, *item in found:
        key = None if call.splits_batch else call.devices
        by_devices.setdefault(key, []).append(item)
    write_gradients(by_devices.pop(None, ()), names)
    # Operators share resources with others of the thread that queues them. In a loop
    # a context's gradients may wait for another context's, whose backward comes later.
    for devices, items in by_devices.items():
        devices.map(partial(write_gradients, names=names), [items])


def _gradients_by_name(leaves, heads, gradients, train_mode):
    """Return the gradients of `leaves` by name, if heads depend on them."""
    names = tape.variables_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    if not found:
        return {}
    variables = list(found.values())
    results = tape.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))
