"""Gradients of a parallel net: from one loss on one device back to all devices.

It must not know what a net computes. MXNet has no hook between the caller's graph and
those of the devices, so its function for backward is replaced; docs/design/mxnet.md
says why.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.arguments import comma_list
from ..common.nested import flatten, rebuild
from ..devices.devices import Devices
from ..mxnet_private import graphs
from .gradients import ParameterGradients, adding, differentiate
from .recorded_call import RecordedCall, any_alive, calls_before, join
from .shards import Shards


def gather(
    outputs: Sequence, shards: Shards, devices: Devices, parameters: Sequence
) -> Any:
    """The outputs of a net as whole arrays on the first context, recorded by autograd.

    `outputs` has for each device of `shards` what the net returned, in equal nesting;
    `devices` computed them, and will run their backward.
    """
    columns = list(zip(*map(flatten, outputs)))  # per output its shards
    if shards.axis is not None:
        _check_joinable(outputs, shards)
    recording = autograd.is_recording()
    recorded = [recording and graphs.is_recorded(column[0]) for column in columns]
    wholes = iter([])
    if any(recorded):
        _replace_backward()
        cut = list(itertools.compress(columns, recorded))
        wholes = iter(RecordedCall(cut, shards, devices, parameters).outputs())
    leaves = [
        next(wholes) if is_cut else join(column, shards.axis, shards.contexts[0])
        for column, is_cut in zip(columns, recorded)
    ]
    return rebuild(outputs[0], iter(leaves))


def _check_joinable(outputs, shards):
    """ValueError if outputs differ in more than values and the rows of their shards."""
    forms = []
    for output, rows in zip(outputs, shards.rows):
        leaves = enumerate(flatten(output))
        texts = [
            _shape_text(number, leaf, rows, shards.axis) for number, leaf in leaves
        ]
        forms.append(str(rebuild(output, iter(texts))))
    for context, form in zip(shards.contexts, forms):
        if form != forms[0]:
            raise ValueError(
                f"the outputs on {shards.contexts[0]} are {forms[0]}, but those on "
                f"{context} are {form}, expected the same structure, types, dtypes and "
                f"shapes apart from the rows (*) along axis {shards.axis}"
            )


def _shape_text(number, leaf, rows, axis):
    """A text that has to be the same on all devices."""
    if not isinstance(leaf, mx.nd.NDArray):
        return type(leaf).__name__
    shape = list(leaf.shape)
    if not -len(shape) <= axis < len(shape) or shape[axis] != rows:
        raise ValueError(
            f"output {number} has shape {leaf.shape} on {leaf.context}, expected "
            f"{rows} rows along axis {axis} as the input has; what has no rows cannot "
            "be joined: a loss inside of the net returns one value a row"
        )
    shape[axis] = "*"
    return f"{type(leaf).__name__} {np.dtype(leaf.dtype)} ({comma_list(shape)})"


@lru_cache(maxsize=None)
def _replace_backward():
    """With the first recorded call; MXNet's own runs while no such call is alive."""
    graphs.replace_backward(_backward, any_alive)


def _backward(backward):
    """Replaces MXNet's backward.

    It concerns the calls that the heads depend on: graphs of several nets, and of
    several threads, stay apart.
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
    has_inputs = any(call.inputs for call in calls)
    write = _write_gradients_behind_too if has_inputs else _write_gradients
    parameters, is_kept = ParameterGradients(calls), False
    try:
        with autograd.pause(), parameters.to_be_written():
            write(calls, leaves, backward, parameters)
        is_kept = backward.retain_graph
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


def _write_gradients(calls, leaves, backward, parameters):
    """The usual case: no input of a call has a gradient."""
    with adding(parameters.everywhere):
        found = differentiate(
            *(backward.heads, backward.gradients, list(leaves.values())),
            *(backward.retain_graph, backward.train_mode),
        )
    cut_gradients = dict(zip(leaves, found))
    for call in calls:
        _write_on_devices(call, calls, cut_gradients, backward, parameters)


def _write_gradients_behind_too(calls, leaves, backward, parameters):
    """Also differentiates what lies behind the devices', where inputs have gradients.

    The caller's graph is differentiated for the cut leaves first, call by call, and
    last, from the heads and all inputs, for its own variables.
    """
    heads, gradients = backward.heads, backward.gradients
    cut_gradients = _gradients(leaves, heads, gradients, backward.train_mode)
    for call in calls:
        found = _write_on_devices(call, calls, cut_gradients, backward, parameters)
        if found:
            behind = _gradients(leaves, call.inputs, found, backward.train_mode)
            for name, gradient in behind.items():
                earlier = cut_gradients.get(name)
                is_first = earlier is None
                cut_gradients[name] = gradient if is_first else earlier + gradient
            heads, gradients = heads + call.inputs, gradients + found
    with adding(parameters.everywhere):
        flags = backward.retain_graph, backward.train_mode
        differentiate(heads, gradients, (), *flags)


def _write_on_devices(call, calls, cut_gradients, backward, parameters):
    """Writes the gradients of a call's devices; returns those of its inputs."""
    # Running statistics, or a common output, join the graphs of several calls.
    retain_graph = backward.retain_graph or call is not calls[-1]

    def write(context, outputs, dys, inputs):
        with adding(parameters.on.get(context, ())):
            flags = retain_graph, backward.train_mode
            return differentiate(outputs, dys, inputs, *flags)

    return call.map(write, cut_gradients)


def _gradients(leaves, heads, gradients, train_mode):
    """Gradients of the leaves that heads depend on, by name; keeps the graph."""
    names = graphs.names_behind(heads)
    found = {name: leaf for name, leaf in leaves.items() if name in names}
    if not found:
        return {}
    variables = list(found.values())
    results = graphs.differentiate(heads, gradients, variables, True, train_mode)
    return dict(zip(found, results))
