"""A recorded call of a net on devices. Its graphs are cut from the caller's graph.

    caller's graph   inputs                              join(cut leaves) -> loss
                       |                                         |
    ----- cut -----  detached shards                         detached outputs
                       |                                         |
    device graphs    device inputs  ----- the net ----->  device outputs

Backward computes gradients of the cut leaves (the detached outputs), continues in the
devices' graphs, and then, if inputs have gradients, in the graph that computed them.
"""

from __future__ import annotations

import collections
import weakref
from itertools import compress
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private import graphs
from ..mxnet_private.arrays import broadcast_add, flatten, to_context
from ..mxnet_private.blocks import blocks_of, name_of
from ..mxnet_private.parameters import data_of
from ..native.library import load
from ..native.steps import list_alive
from .devices import Devices
from .shards import Shards, join_shards

_calls = weakref.WeakValueDictionary()  # {id: RecordedCall} in the order of calls


class _DeviceOperators(NamedTuple):
    """Operators that devices have recorded, on which a loss must not depend."""

    net: str
    ends: list  # result of an operator recorded before these, and of one recorded after
    variables: set  # names of all variables that these operators may depend on


# The operators of the latest 100 calls. A net may have kept their results for a loss.
_device_operators: Any = collections.deque(maxlen=100)


def refuse_losses(net: mx.gluon.Block, begin: mx.nd.NDArray, variables: set) -> None:
    """Refuse losses that depend on operators recorded since the operator `begin`."""
    ends = [begin, graphs.record_operator()]
    _device_operators.append(_DeviceOperators(name_of(net), ends, variables))


def calls_behind(heads: Iterable) -> tuple[list[RecordedCall], set[str]]:
    """Return the calls, the latest first, and the variables that heads depend on."""
    names, found = graphs.variables_behind(heads), []
    _check_only_outputs(heads, names)
    for call in reversed(list_alive(_calls)):
        if not names.isdisjoint(call.cut_leaves):  # then search behind its inputs
            found.append(call)
            names |= graphs.variables_behind(call.inputs)
    return found, names


def _check_only_outputs(heads, names):
    """Raise ValueError if heads depend on a device's array that is not an output."""
    found = [x for x in list(_device_operators) if not names.isdisjoint(x.variables)]
    numbers = graphs.operators_behind(heads) if found else []
    for operators in found:
        before, after = graphs.operators_behind(operators.ends)
        if any(before < number < after for number in numbers):
            raise ValueError(
                f"the loss depends on an array that {operators.net} computed on one "
                "device and did not return, so the rows of other devices would not "
                "count. Return the array from the net, with one value per row."
            )


class RecordedCall:
    """A recorded call of a net. It lives as long as the graph of its outputs."""

    def __init__(
        self,
        net: mx.gluon.Block,
        devices: Devices,
        shards: Shards,
        parameters: Sequence,
    ) -> None:
        self.parameters, self._net = parameters, net
        self._devices, self._shards = devices, shards
        self.splits_batch = shards.axis is not None
        self._begin = graphs.record_operator()
        # Backward uses these views as heads. MXNet accepts no variable as a head.
        self.inputs = [x.reshape(x.shape) for x, *_ in shards.recorded]
        per_device = zip(*(column for _, column, _ in shards.recorded))
        named = [dict(zip(graphs.names_of(xs), xs)) for xs in per_device]
        self._device_inputs = named or [{}] * len(shards.contexts)
        self.cut_leaves: dict = {}  # {name: detached output, a variable}
        self.heads: list = []  # the devices' outputs that the latest backward reached

    def join(self, outputs: Sequence, known: dict) -> list:
        """Join the devices' outputs in the caller's graph, which then owns this object.

        `known` is a cache, {context: names of the parameters' variables}.
        """
        axis, contexts = self._shards.axis, self._shards.contexts
        if len(outputs[0]) > 1:
            outputs = list(map(_distinct_heads, outputs))
        self._device_outputs = outputs
        places = zip(contexts, outputs, self._device_inputs)
        have_variables = [self._check_variables(*place, known) for place in places]
        if len(contexts) > 1 or axis is None:
            names = set().union(*known.values(), *self._device_inputs)
            refuse_losses(self._net, self._begin, names)
        joined = [self._join_output(shards, have_variables) for shards in zip(*outputs)]
        self._leaf_names = list(zip(*(names for _, names in joined)))
        return [output for output, _ in joined]

    def _check_variables(self, context, outputs, inputs, known):
        """Return True if a device's graph has variables; raise if one is foreign."""
        names = graphs.variables_behind(outputs)
        foreign = names - inputs.keys() - known.get(context, set())
        if foreign or context not in known:
            known[context] = variables_on(context, self.parameters)
        foreign -= known[context]
        if foreign:
            raise ValueError(
                f"{_holder_of(foreign, self._net)}, which {name_of(self._net)} reads, "
                "depends on a variable that is neither an argument of the call nor a "
                "parameter of the net, so its gradient would be wrong. Pass the array "
                "as an argument, or register the parameter."
            )
        return bool(names)

    def _join_output(self, shards, have_variables):
        """Return a joined output, and for each device the cut leaf's name or None."""
        axis, context = self._shards.axis, self._shards.contexts[0]
        pairs = zip(have_variables, graphs.names_of(shards))
        are_variables = [has_variables and bool(name) for has_variables, name in pairs]
        if not any(are_variables):
            return join_shards(shards, axis, context), [None] * len(shards)
        detached = [shard.detach().as_nd_ndarray() for shard in shards]
        leaves = [to_context(leaf, context) for leaf in detached]
        variables = list(compress(leaves, are_variables))
        gradients = [mx.nd.empty(x.shape, context, x.dtype) for x in variables]
        autograd.mark_variables(variables, gradients)
        names = graphs.names_of(leaves)
        self.cut_leaves.update((n, x) for n, x in zip(names, leaves) if n)
        _calls[id(self)] = self
        set_flag = load().gluon_syncbn_set_flag
        zero = graphs.owning_zero(self, leaves[0], set_flag)
        leaves[0] = broadcast_add(leaves[0], zero)
        output = join_shards(leaves, axis, context)
        is_np = isinstance(shards[0], mx.np.ndarray)
        return output.as_np_ndarray() if is_np else output, names

    def backward(
        self, cut_gradients: dict, adding: Callable, train_mode: bool
    ) -> tuple[list, list]:
        """Run backward through each device's graph, in the device's thread.

        The context manager `adding([context])` makes a graph add to earlier gradients.
        Return the inputs that have gradients, and their gradients.
        """

        def backward_on(context, outputs, names, inputs):
            reached = [k for k, name in enumerate(names) if name in cut_gradients]
            heads = [outputs[k] for k in reached]
            variables = graphs.variables_behind(heads)
            if not variables:
                return [], [None] * len(inputs)
            dys = [to_context(cut_gradients[names[k]], context) for k in reached]
            with adding([context]):
                graphs.differentiate(heads, dys, (), True, train_mode)
            dxs = [x.grad if name in variables else None for name, x in inputs.items()]
            return heads, dxs

        arguments = self._device_outputs, self._leaf_names, self._device_inputs
        found = self._devices.map_first(backward_on, self._shards.contexts, *arguments)
        self.heads = sum((heads for heads, _ in found), [])
        recorded, columns = self._shards.recorded, zip(*(dxs for _, dxs in found))
        inputs, gradients = [], []
        for x, (_, shards, axis), dxs in zip(self.inputs, recorded, columns):
            if any(dx is not None for dx in dxs):
                pairs = zip(dxs, shards)
                filled = [mx.nd.zeros_like(y) if dx is None else dx for dx, y in pairs]
                inputs.append(x)
                gradients.append(join_shards(filled, axis, x.context))
        return inputs, gradients


def variables_on(context: mx.Context, parameters: Iterable) -> set[str | None]:
    arrays = [data for parameter in parameters for data in data_of(parameter)]
    return set(graphs.names_of(data for data in arrays if data.context == context))


def _distinct_heads(outputs):
    """Replace duplicates by views; MXNet uses only one gradient of a repeated head."""
    names, heads = set(), []
    for output, name in zip(outputs, graphs.names_of(outputs)):
        is_duplicate = name is not None and name in names
        heads.append(output.reshape(output.shape) if is_duplicate else output)
        names.add(name)
    return heads


def _holder_of(names, net):
    if any(names & call.cut_leaves.keys() for call in list_alive(_calls)):
        return "the result of a net that is parallel over other devices"
    for block in blocks_of(net):
        for attribute, value in vars(block).items():
            for item in flatten(value):
                is_parameter = isinstance(item, mx.gluon.Parameter)
                arrays = data_of(item) if is_parameter else [item]
                if not names.isdisjoint(graphs.variables_behind(arrays)):
                    return f"the attribute '{attribute}' of {name_of(block)}"
    return "an array"
