"""A recorded call of a net on devices: where the caller's graph is cut.

    caller's graph   inputs                            join(cut leaves + zeros) -> loss
                       |                                         |
    ----- cut -----  detached shards                         detached outputs
                       |                                         |
    device graphs    device inputs  ----- the net ----->  device outputs

Backward goes through the caller's graph to the gradients of the cut leaves, from there
through each device's graph, and, where inputs have gradients, on through the caller's.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Iterable, Sequence

import mxnet as mx
from mxnet import autograd

from ..devices.devices import Devices, inside_map
from ..mxnet_private import graphs
from ..mxnet_private.library import broadcast_add, concat, to_context
from ..native import failures
from .shards import Shards

_calls = weakref.WeakValueDictionary()  # in order, by the name of the lifetime anchor


def any_alive() -> bool:
    """Tells whether any recorded call is alive."""
    return bool(_calls)


def calls_before(heads: Iterable) -> tuple[list[RecordedCall], set[str]]:
    """The calls that some heads depend on, the latest first, and all variables' names.

    A call's outputs are variables, so what it was called with is looked up here.
    """
    names, found = graphs.names_behind(heads), []
    for call in reversed(_alive()):
        if call.lifetime_anchor in names:
            found.append(call)
            names |= graphs.names_behind(call.inputs)
    return found, names


def _alive():
    """All calls in order; a loop over the dictionary fails if a thread changes it."""
    calls = [reference() for reference in _calls.valuerefs()]
    return [call for call in calls if call is not None]


class RecordedCall:
    """One recorded call of a net on devices, alive as long as the caller's graph is.

    Attributes
    ----------
    parameters : list of mxnet.gluon.Parameter
        The net's.
    inputs : list of NDArray
        Heads of the caller's graph before the call.
    cut_leaves : dict of NDArray
        By name the variables of the caller's graph after the call.
    device_inputs, device_outputs : list of sequences of NDArray
        For each device the variables and the heads of its graph.
    """

    def __init__(
        self, columns: Sequence, shards: Shards, devices: Devices, parameters: Sequence
    ) -> None:
        self.devices, self.parameters = devices, parameters
        self._contexts, self._axis = shards.contexts, shards.axis
        self.was_in_map = inside_map()
        self.device_outputs = list(zip(*columns))
        self._check_not_nested()
        # Views, because MXNet takes no variable as a head, and none twice.
        arrays = [x.as_nd_ndarray() for x, _ in shards.recorded]
        self.inputs = [x.reshape(x.shape) for x in arrays]
        per_device = list(zip(*(column for _, column in shards.recorded)))
        self.device_inputs = per_device or [()] * len(self._contexts)
        with autograd.pause():
            self._leaves = [list(map(self._cut_leaf, column)) for column in columns]
        leaves = itertools.chain(*self._leaves)
        self.cut_leaves = {graphs.name_of(leaf): leaf for leaf in leaves}

    def outputs(self) -> list:
        """The whole outputs, in the caller's graph, which keeps this object."""
        context = self._contexts[0]
        anchor = mx.nd.zeros((1,), ctx=context)
        anchor.attach_grad("null")
        failures.watch_process()  # there may be no layer
        failures.function_contexts.add(context)
        zeros = _GraphLifetime(self, [last for *_, last in self._leaves])(anchor)
        outputs = []
        for (*others, last), zero in zip(self._leaves, zeros):
            linked = [*others, broadcast_add(last, zero)]
            outputs.append(join(linked, self._axis, context))
        if isinstance(self.device_outputs[0][0], mx.np.ndarray):
            outputs = [output.as_np_ndarray() for output in outputs]
        self.lifetime_anchor = graphs.name_of(anchor)
        _calls[self.lifetime_anchor] = self
        return outputs

    def _cut_leaf(self, shard):
        leaf = to_context(shard.detach().as_nd_ndarray(), self._contexts[0])
        gradient = mx.nd.empty(leaf.shape, leaf.context, leaf.dtype)
        autograd.mark_variables([leaf], [gradient])
        return leaf

    def _check_not_nested(self):
        """RuntimeError if a device's graph holds the call of another parallel net."""
        nested = {call.lifetime_anchor for call in _alive() if call.was_in_map}
        outputs = itertools.chain(*self.device_outputs)
        if nested and not nested.isdisjoint(graphs.names_behind(outputs)):
            raise RuntimeError(
                "a net that runs on each device called a net that is parallel over "
                "other devices, through which no gradient can return; expected that "
                "both are parallel over the same devices, or only the outer one"
            )

    def map(self, function: Any, cut_gradients: dict) -> list:
        """Calls `function` in the thread of each device that a backward has reached.

        It gets the context, the device's outputs that were reached, their gradients,
        and the device's inputs, and returns the gradients of these. `cut_gradients` are
        those of the cut leaves, by name. Returns the gradients of `inputs`.
        """

        def call(context, outputs, leaves, inputs):
            dys = [cut_gradients.get(graphs.name_of(leaf)) for leaf in leaves]
            reached = [k for k, dy in enumerate(dys) if dy is not None]
            if not reached:
                return []
            with autograd.pause():
                dys = [to_context(dys[k], context) for k in reached]
            dxs = function(context, [outputs[k] for k in reached], dys, inputs)
            # Another call may have the same shards, and write to their gradients.
            return [dx.copy() for dx in dxs]

        leaves = list(zip(*self._leaves))
        arguments = self._contexts, self.device_outputs, leaves, self.device_inputs
        columns = zip(*self.devices.map_first(call, *arguments))
        return [
            join(column, self._axis, x.context)
            for column, x in zip(columns, self.inputs)
        ]

    def release(self) -> None:
        """Drops the devices' graphs."""
        self.device_outputs = self.device_inputs = self._leaves = self.inputs = []
        self.cut_leaves = {}
        _calls.pop(self.lifetime_anchor, None)


def join(shards: Sequence, axis: int | None, context: mx.Context) -> Any:
    """The shards of one output as a whole; if they are no arrays, the first one."""
    if not isinstance(shards[0], mx.nd.NDArray):
        return shards[0]
    arrays = [to_context(shard, context) for shard in shards]
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], mx.np.ndarray):
        return mx.np.concatenate(arrays, axis=axis)
    return concat(*arrays, dim=axis)


class _GraphLifetime(autograd.Function):
    """Zeros, one for each output: MXNet keeps the function, and so the call, as long as
    the graph.
    """

    def __init__(self, call, leaves):
        super().__init__()
        self._call = call
        self._forms = [((1,) * leaf.ndim, leaf.context, leaf.dtype) for leaf in leaves]

    def forward(self, anchor):
        return [mx.nd.zeros(*form) for form in self._forms]
