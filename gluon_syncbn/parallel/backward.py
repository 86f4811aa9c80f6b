"""Gradients of a parallel net: from one loss on one device back to all devices.

It must not know what a net computes. MXNet has no hook between the caller's graph and
those of the devices, so its function for backward is replaced; docs/design/mxnet.md
says why.
"""

from __future__ import annotations

import itertools
from functools import lru_cache, partial
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.arguments import listed
from ..common.nested import flatten, rebuild
from ..devices.devices import Devices
from ..mxnet_private import graphs
from .batch import Batch
from .bridge import Call, any_alive, calls_before, join
from .destination import Destination


def gather(outputs: Sequence, batch: Batch, devices: Devices) -> Any:
    """The outputs of a net as whole arrays on the first context, recorded by autograd.

    `outputs` has for each shard of `batch` what the net returned, in equal nesting;
    `devices` computed them, and will run their backward.
    """
    axis = batch.axis
    columns = list(zip(*map(flatten, outputs)))  # per output its shards
    if axis is not None:
        _check_joinable(outputs, batch)
    recording = autograd.is_recording()
    recorded = [recording and graphs.is_recorded(column[0]) for column in columns]
    wholes = iter([])
    if any(recorded):
        _replace_backward()
        in_graph = list(itertools.compress(columns, recorded))
        wholes = iter(Call(in_graph, batch, devices).outputs())
    leaves = [
        next(wholes) if is_in_graph else join(column, axis, batch.contexts[0])
        for column, is_in_graph in zip(columns, recorded)
    ]
    return rebuild(outputs[0], iter(leaves))


def _check_joinable(outputs, batch):
    """ValueError if outputs differ in more than values and the rows of their shards."""
    forms = []
    for output, rows in zip(outputs, batch.rows):
        leaves = enumerate(flatten(output))
        texts = [_form(number, leaf, rows, batch.axis) for number, leaf in leaves]
        forms.append(str(rebuild(output, iter(texts))))
    for context, form in zip(batch.contexts, forms):
        if form != forms[0]:
            raise ValueError(
                f"the outputs on {batch.contexts[0]} are {forms[0]}, but those on "
                f"{context} are {form}, expected the same structure, types, dtypes and "
                f"shapes apart from the rows (*) along axis {batch.axis}"
            )


def _form(number, leaf, rows, axis):
    """A text that has to be the same on all devices."""
    if not isinstance(leaf, mx.nd.NDArray):
        return type(leaf).__name__
    shape = list(leaf.shape)
    if not -len(shape) <= axis < len(shape) or shape[axis] != rows:
        raise ValueError(
            f"output {number} has shape {leaf.shape} on {leaf.context}, expected "
            f"{rows} rows along axis {axis} as the input has; what has no rows cannot "
            "be joined: use make_parallel(..., gather=False)"
        )
    shape[axis] = "*"
    return f"{type(leaf).__name__} {np.dtype(leaf.dtype)} ({listed(shape)})"


@lru_cache(maxsize=None)
def _replace_backward():
    """With the first recorded call; MXNet's own runs while no such call is alive."""
    graphs.replace_backward(_backward, any_alive)


def _backward(request):
    """Replaces MXNet's backward.

    It concerns the calls that the heads depend on: graphs of several nets, and of
    several threads, stay apart.
    """
    calls, names = calls_before(request.heads)
    if not calls:
        request.run()
        return
    if request.is_grad:
        raise ValueError(
            "autograd.grad was called with heads that depend on a parallel net, or on "
            "one of allow_plain_loop, expected attach_grad of the variables before the "
            "net is called, and backward, which writes to their attribute grad"
        )
    _check_head_gradients(request)
    with autograd.pause():
        _through(calls, names, request)


def _check_head_gradients(request):
    """ValueError if a gradient does not fit its head.

    MXNet notices another dtype when it computes, and another shape never.
    """
    for number, pair in enumerate(zip(request.heads, request.gradients)):
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


def _through(calls, names, request):
    """Backward through the caller's graph and all devices' graphs that it reaches.

    If inputs of a call have gradients, part of the caller's graph is on the other side
    of the devices' graphs. Then the first pass through the caller's graph is for the
    leaves only, and the last one, from the heads and those inputs, for its variables.
    """
    destination = Destination(calls, request.train_mode)
    heads, gradients, is_kept = request.heads, request.gradients, False
    of_caller = partial(destination.differentiate, request.retain_graph, None)
    leaves = {n: leaf for call in calls for n, leaf in call.leaves.items()}
    leaves = {n: leaf for n, leaf in leaves.items() if n in names}
    has_inputs = any(call.inputs for call in calls)
    try:
        if has_inputs:
            of_leaves = _gradients(leaves, heads, gradients, request.train_mode)
        else:
            found = of_caller(heads, gradients, list(leaves.values()))
            of_leaves = dict(zip(leaves, found))
        for call in calls:
            # Running statistics, or a common output, join the graphs of several calls.
            retain_graph = request.retain_graph or call is not calls[-1]
            of_device = partial(destination.differentiate, retain_graph)
            of_inputs = call.resume(of_leaves, of_device)
            if of_inputs:
                found = _gradients(leaves, call.inputs, of_inputs, request.train_mode)
                for name, gradient in found.items():
                    earlier = of_leaves.get(name)
                    if earlier is not None:
                        gradient = earlier + gradient
                    of_leaves[name] = gradient
                heads, gradients = heads + call.inputs, gradients + of_inputs
        if has_inputs:
            of_caller(heads, gradients, [])
        destination.finish()
        is_kept = request.retain_graph
    finally:
        destination.restore()
        if not is_kept:
            for call in calls:
                call.release()


def _gradients(leaves, heads, gradients, train_mode):
    """Those of leaves that some heads depend on, by name; the graph stays."""
    names = graphs.names_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    variables = list(found.values())
    if not variables:
        return {}
    results = graphs.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))
