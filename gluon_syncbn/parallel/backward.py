"""Gradients of a parallel net: from one loss on one device back to all devices.

Called by ``net.py``. It joins two kinds of graphs, which `autograd` keeps apart:

* the caller's, of what is computed from the gathered outputs, and perhaps of what the
  inputs were computed from. Its backward is pushed from the caller's thread;
* each device's, from its shard to its outputs. Its backward has to be pushed from the
  thread of its context (``devices.py`` says why).

MXNet has no hook between them, so the library's function for backward is wrapped: when
it has gone through the caller's graph, the bridges (``bridge.py``) have the gradients
of the net's outputs, and the devices' graphs are differentiated with these. A backward
concerns the calls of parallel nets whose anchors its heads depend on. So graphs of
several nets, and of several threads, stay apart.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.nested import flatten, rebuild
from ..native import failures
from . import graph
from .batch import ShardedOutput
from .bridge import Gate, Leaves, await_any, join
from .destination import Returned, Written, array_of
from .operators import to_context

_original = None
_install_once = threading.Lock()
_numbers = itertools.count()
_calls = weakref.WeakValueDictionary()  # by the name of the anchor
_inside = threading.local()  # .calls: how many calls the outer backward has reached


def gather(sharded: ShardedOutput, net: Any) -> Any:
    """The outputs of a net as whole arrays on the first context, and recorded there."""
    context, axis = net.devices.contexts[0], net.batch_axis
    _check_alike(sharded, net.devices.contexts, axis)
    columns = list(zip(*map(flatten, sharded)))  # per output its parts
    rows = sharded.batch.shard_rows()
    for number, column in enumerate(columns if rows else []):
        _check_rows(number, column, rows, axis)
    recording = autograd.is_recording()
    recorded = [recording and graph.is_recorded(column[0]) for column in columns]
    wholes = iter([])
    if any(recorded):
        in_graph = list(itertools.compress(columns, recorded))
        wholes = iter(_Call(sharded.batch, net).attach(in_graph, sharded.batch))
    leaves = [
        next(wholes) if is_in_graph else join(column, axis, context)
        for column, is_in_graph in zip(columns, recorded)
    ]
    return rebuild(sharded[0], iter(leaves))


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
    for part, expected in zip(column, rows):
        if not isinstance(part, mx.nd.NDArray):
            continue
        axis_there = -part.ndim <= axis < part.ndim
        if not axis_there or part.shape[axis] != expected:
            raise ValueError(
                f"output {number} has shape {part.shape} on {part.context}, expected "
                f"{expected} rows along axis {axis} as the input has there; what has "
                "no rows cannot be joined: use make_parallel(..., gather=False)"
            )


class _Call:
    """One recorded call of a parallel net, alive as long as the caller's graph is."""

    def __init__(self, batch, net):
        self.net = net
        self.parameters, self.contexts = batch.parameters, net.devices.contexts
        failures.function_contexts.update(self.contexts)
        self.number = next(_numbers)
        self.reached = 0  # how many calls the backward under way has reached
        kind = Gate if batch.differentiable else Leaves
        self.bridge = kind(net.devices.contexts[0], net.batch_axis)
        self.heads = []  # per device its outputs
        self._shards = []  # per device those of the differentiable inputs

    def attach(self, columns, batch):
        """The outputs, given as columns of parts, as whole arrays of the caller."""
        self.heads = list(zip(*columns))
        inputs = [x for x, _ in batch.differentiable]
        shards = [parts for _, parts in batch.differentiable]
        self._shards = list(zip(*shards)) or [()] * len(self.heads)
        outputs = self.bridge.attach(self, columns, inputs)
        _calls[self.bridge.name] = self
        _install()
        return outputs

    def resume(self, gradients, differentiate):
        """Queues the devices' backward, and delivers the gradients of the inputs.

        `gradients` are those of the bridge's variables, by name. `differentiate` takes
        outputs of a device, their gradients, and shards; it returns the gradients of
        the shards.
        """
        devices = self.net.devices

        def backward(heads, gradients, shards, context):
            there = [k for k, gradient in enumerate(gradients) if gradient is not None]
            if not there:
                return []
            with autograd.pause():
                gradients = [to_context(gradients[k], context) for k in there]
            _inside.calls = self.reached
            try:
                return differentiate([heads[k] for k in there], gradients, shards)
            finally:
                _inside.calls = 0

        contexts = devices.contexts[: len(self.heads)]
        lists = self.heads, self.bridge.collect(gradients), self._shards, contexts
        inputs = devices.map_first(backward, *lists)
        if any(self._shards):
            devices.map_first(self.bridge.deliver, [list(zip(*inputs))])

    def cancel(self, error):
        """Ends the waits for gradients that will not arrive."""
        self.bridge.cancel(error)
        self.release()

    def release(self):
        """Drops the devices' graphs."""
        self.heads = self._shards = []
        _calls.pop(self.bridge.name, None)


def _backward(*arguments):
    """Replaces the library's MXAutogradBackwardEx."""
    num_heads, heads, num_variables, retain_graph = (
        getattr(arguments[k], "value", arguments[k]) for k in (0, 1, 3, 5)
    )
    # A device's graph has none of the calls whose backward this is a part of. To look
    # for others takes as long as to queue a small net's backward.
    if len(_calls) == getattr(_inside, "calls", 0):
        return _original(*arguments)
    heads = [ctypes.c_void_p(heads[k]) for k in range(num_heads)]
    names = graph.names_behind(heads)
    calls = [call for call in map(_calls.get, names) if call is not None]
    if not calls:
        return _original(*arguments)
    _check_head_gradients(heads, arguments[2])
    destination = (Returned if num_variables else Written)(calls, names, arguments)
    with autograd.pause():
        return _through(calls, heads, destination, bool(retain_graph))


def _check_head_gradients(heads, gradients):
    """ValueError before MXNet's threads fail, for which gates would wait in vain."""
    if isinstance(gradients, ctypes.c_void_p):
        return
    for number, (head, gradient) in enumerate(zip(heads, gradients)):
        if gradient is None:
            continue
        expected, given = (
            f"shape {array.shape} and dtype {np.dtype(array.dtype)}"
            for array in map(array_of, (head.value, gradient))
        )
        if given != expected:
            raise ValueError(
                f"the gradient of head {number} has {given}, expected {expected} as "
                "the head has"
            )


def _through(calls, heads, destination, retain_graph):
    """Backward through the caller's graph and all devices' graphs that it reaches."""
    reached = []
    recovery = failures.latest_recovery
    try:
        code = destination.of_caller(_original)
        if code != 0:
            return code
        reached = calls
        if any(isinstance(call.bridge, Gate) for call in reached):
            # If the heads have failed, nothing will arrive at the gates.
            for head in heads:
                mx.base.check_call(mx.base._LIB.MXNDArrayWaitToRead(head))
        left = len(reached)
        for call in reached:
            call.reached = left
        for call in _in_order(reached, recovery):
            left -= 1
            # Running statistics, or a common output, join the graphs of several calls.
            destination.of_devices(call, retain_graph or left > 0)
        destination.finish()
    except BaseException as error:
        for call in reached:
            call.cancel(error)
        raise
    finally:
        destination.restore()
    if not retain_graph:
        for call in reached:
            call.release()
    return code


def _in_order(calls, recovery):
    """Calls as their gradients arrive: none waits for those of a later one."""
    gates = {call.bridge: call for call in calls if isinstance(call.bridge, Gate)}
    while gates:
        yield gates.pop(await_any(gates, recovery))
    # A call may have fed later ones, never earlier ones.
    leaves = [call for call in calls if isinstance(call.bridge, Leaves)]
    yield from sorted(leaves, key=lambda call: call.number, reverse=True)


def _install():
    global _original
    with _install_once:
        if _original is None:
            _original = mx.base._LIB.MXAutogradBackwardEx
            mx.base._LIB.MXAutogradBackwardEx = _backward
