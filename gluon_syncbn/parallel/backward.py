"""Gradients of a parallel net: from one loss on one device back to all devices.

Called by ``net.py``, ``criterion.py`` and ``plain_loop.py``. It must not know what a
net computes. MXNet has no hook between the caller's graph and those of the devices, so
its function for backward is replaced; docs/design/mxnet.md says why.
"""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.nested import flatten, rebuild
from ..devices.devices import Devices
from ..mxnet_private import graphs
from .batch import Batch
from .bridge import Call, calls_before, join
from .destination import Returned, Written


def gather(outputs: Sequence, batch: Batch, devices: Devices) -> Any:
    """The outputs of a net as whole arrays on the first context, recorded by autograd.

    `outputs` has for each shard of `batch` what the net returned, in equal nesting;
    `devices` computed them, and will run their backward.
    """
    axis = batch.axis
    columns = list(zip(*map(flatten, outputs)))  # per output its shards
    if axis is not None:
        _check_alike(outputs, batch.contexts, axis)
        for number, column in enumerate(columns):
            _check_rows(number, column, batch.rows, axis)
    recording = autograd.is_recording()
    recorded = [recording and graphs.is_recorded(column[0]) for column in columns]
    wholes = iter([])
    if any(recorded):
        in_graph = list(itertools.compress(columns, recorded))
        graphs.replace_backward(_backward)
        wholes = iter(Call(in_graph, batch, devices).outputs())
    leaves = [
        next(wholes) if is_in_graph else join(column, axis, batch.contexts[0])
        for column, is_in_graph in zip(columns, recorded)
    ]
    return rebuild(outputs[0], iter(leaves))


def _check_alike(sharded, contexts, axis):
    """ValueError if outputs differ in more than rows and values."""
    first, *others = [
        str(rebuild(value, iter([_form(leaf, axis) for leaf in flatten(value)])))
        for value in sharded
    ]
    for context, form in zip(contexts[1:], others):
        if form != first:
            raise ValueError(
                f"the outputs on {contexts[0]} are {first}, but those on {context} "
                f"are {form}, expected the same structure, types, dtypes and shapes "
                f"apart from the rows (*) along axis {axis}"
            )


def _form(leaf, axis):
    """A text that has to be the same on all devices."""
    if not isinstance(leaf, mx.nd.NDArray):
        return type(leaf).__name__
    shape = list(map(str, leaf.shape))
    if -len(shape) <= axis < len(shape):
        shape[axis] = "*"
    return f"{type(leaf).__name__} {np.dtype(leaf.dtype)} ({', '.join(shape)})"


def _check_rows(number, column, rows, axis):
    for shard, expected in zip(column, rows):
        if not isinstance(shard, mx.nd.NDArray):
            continue
        has_axis = -shard.ndim <= axis < shard.ndim
        if not has_axis or shard.shape[axis] != expected:
            raise ValueError(
                f"output {number} has shape {shard.shape} on {shard.context}, expected "
                f"{expected} rows along axis {axis} as the input has; what has no "
                "rows cannot be joined: use make_parallel(..., gather=False)"
            )


def _backward(request):
    """Replaces MXNet's backward.

    It concerns the calls that the heads depend on: graphs of several nets, and of
    several threads, stay apart.
    """
    calls, names = calls_before(request.heads)
    if not calls:
        request.run()
        return
    _check_head_gradients(request)
    kind = Returned if request.variables else Written
    with autograd.pause():
        _through(calls, request, kind(calls, names, request))


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


def _through(calls, request, destination):
    """Backward through the caller's graph and all devices' graphs that it reaches.

    If inputs of a call have gradients, part of the caller's graph is on the other side
    of the devices' graphs. Then the first pass through the caller's graph is for the
    leaves only, and the last one, from the heads and those inputs, for its variables.
    """
    heads, gradients = request.heads, request.gradients
    leaves = {name: leaf for call in calls for name, leaf in call.leaves.items()}
    has_inputs = any(call.inputs for call in calls)
    try:
        if has_inputs:
            of_leaves = _gradients(leaves, heads, gradients, request.train_mode)
        else:
            of_leaves = destination.of_caller(heads, gradients, leaves)
        for call in calls:
            # Running statistics, or a common output, join the graphs of several calls.
            retain_graph = request.retain_graph or call is not calls[-1]
            of_inputs = destination.of_devices(call, of_leaves, retain_graph)
            if of_inputs:
                found = _gradients(leaves, call.inputs, of_inputs, request.train_mode)
                for name, gradient in found.items():
                    earlier = of_leaves.get(name)
                    if earlier is not None:
                        gradient = earlier + gradient
                    of_leaves[name] = gradient
                heads, gradients = heads + call.inputs, gradients + of_inputs
        if has_inputs:
            destination.of_caller(heads, gradients, {})
        destination.finish()
    except BaseException:
        for call in calls:
            call.release()
        raise
    finally:
        destination.restore()
    if not request.retain_graph:
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
