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

import itertools
import weakref
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.nested import flatten, rebuild
from ..devices.devices import Devices, inside_map
from ..mxnet_private import graphs
from ..mxnet_private.operators import to_context
from ..native import failures
from .batch import Batch
from .bridge import Gate, Leaves, await_any, join
from .destination import Returned, Written

_numbers = itertools.count()
_calls = weakref.WeakValueDictionary()  # by the name of the anchor


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
        wholes = iter(_Call(batch, devices).attach(in_graph))
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


class _Call:
    """One recorded call of a net on devices, alive as long as the caller's graph is."""

    def __init__(self, batch, devices):
        self.batch, self.devices = batch, devices
        self.was_in_map = inside_map()
        failures.function_contexts.update(devices.contexts)
        self.number = next(_numbers)
        kind = Gate if batch.differentiable else Leaves
        self.bridge = kind(batch)
        self.heads = []  # per device its outputs
        self._shards = []  # per device those of the differentiable inputs

    def attach(self, columns):
        """The outputs, given as columns of shards, as whole arrays of the caller."""
        self.heads = list(zip(*columns))
        self._check_not_nested()
        shards = [column for _, column in self.batch.differentiable]
        self._shards = list(zip(*shards)) or [()] * len(self.heads)
        outputs = self.bridge.attach(self, columns)
        _calls[self.bridge.name] = self
        graphs.replace_backward(_backward)
        return outputs

    def _check_not_nested(self):
        """RuntimeError if a device's graph holds the call of another parallel net."""
        if not any(call.was_in_map for call in list(_calls.values())):
            return
        heads = itertools.chain(*self.heads)
        if not graphs.names_behind(heads).isdisjoint(list(_calls)):
            raise RuntimeError(
                "a net or loss that runs on each device called another parallel net, "
                "through which no gradient can return; expected that only the outer "
                "one is made parallel, and calls the other one's attribute net"
            )

    def resume(self, gradients, differentiate):
        """Queues the devices' backward, and delivers the gradients of the inputs.

        `gradients` are those of the bridge's variables, by name. `differentiate` takes
        outputs of a device, their gradients, and shards; it returns the gradients of
        the shards.
        """

        def backward(heads, gradients, shards, context):
            reached = [k for k, dy in enumerate(gradients) if dy is not None]
            if not reached:
                return []
            with autograd.pause():
                gradients = [to_context(gradients[k], context) for k in reached]
            return differentiate([heads[k] for k in reached], gradients, shards)

        lists = self.heads, self.bridge.collect(gradients), self._shards
        inputs = self.devices.map_first(backward, *lists, self.batch.contexts)
        if any(self._shards):
            self.devices.map_first(self.bridge.deliver, [list(zip(*inputs))])

    def cancel(self, error):
        """Ends the waits for gradients that will not arrive."""
        self.bridge.cancel(error)
        self.release()

    def release(self):
        """Drops the devices' graphs."""
        self.heads = self._shards = []
        _calls.pop(self.bridge.name, None)


def _backward(request):
    """Replaces MXNet's backward."""
    names = graphs.names_behind(request.heads) if _calls else set()
    calls = [call for call in map(_calls.get, names) if call is not None]
    if not calls:
        request.run()
        return
    _check_head_gradients(request)
    kind = Returned if request.variables else Written
    with autograd.pause():
        _through(calls, request, kind(calls, names, request))


def _check_head_gradients(request):
    """ValueError if a gradient does not fit its head.

    Raised here, because a failure in MXNet's threads would leave gates waiting.
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
    """Backward through the caller's graph and all devices' graphs that it reaches."""
    reached = []
    recovery = failures.latest_recovery
    try:
        destination.of_caller()
        reached = calls
        if any(isinstance(call.bridge, Gate) for call in reached):
            # If the heads have failed, nothing will arrive at the gates.
            for head in request.heads:
                head.wait_to_read()
        left = len(reached)
        for call in _in_order(reached, recovery):
            left -= 1
            # Running statistics, or a common output, join the graphs of several calls.
            destination.of_devices(call, request.retain_graph or left > 0)
        destination.finish()
    except BaseException as error:
        for call in reached:
            call.cancel(error)
        raise
    finally:
        destination.restore()
    if not request.retain_graph:
        for call in reached:
            call.release()


def _in_order(calls, recovery):
    """Calls as their gradients arrive: none waits for those of a later one."""
    gates = {call.bridge: call for call in calls if isinstance(call.bridge, Gate)}
    while gates:
        yield gates.pop(await_any(gates, recovery))
    # A call may have fed later ones, never earlier ones.
    leaves = [call for call in calls if isinstance(call.bridge, Leaves)]
    yield from sorted(leaves, key=lambda call: call.number, reverse=True)
