"""A recorded call of a net on devices, which cuts the caller's graph.

    caller's graph   inputs                            join(cut leaves + zeros) -> loss
                       |                                         |
    ----- cut -----  detached shards                         detached outputs
                       |                                         |
    device graphs    device inputs  ----- the net ----->  device outputs

Backward goes through the caller's graph to the gradients of the cut leaves and then
through each device's graph. If inputs have gradients, it goes on through the caller's.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private import graphs
from ..mxnet_private.arrays import broadcast_add, flatten, identity, to_context
from ..mxnet_private.blocks import blocks_of, name_of
from ..mxnet_private.parameters import data_of, is_fresh, mark_fresh
from ..native import failures
from ..native.steps import list_alive
from .devices import Devices
from .shards import Shards, join_shards

_calls = weakref.WeakValueDictionary()  # {number of the call's first operator: call}


class Span(NamedTuple):
    """The operators that a net has recorded on devices during one call."""

    net: str
    first: int
    last: int
    variables: set  # names of all variables that the devices' graphs may have


# The latest 100: a net may keep an array of a device's graph after the call.
_spans: Any = collections.deque(maxlen=100)


def any_recorded() -> bool:
    return bool(_calls or _spans)


def calls_behind(heads: Iterable) -> tuple[list[RecordedCall], set[str]]:
    """Return the calls that heads depend on, latest first, and all variables' names.

    A call's outputs are variables, so the search goes on from the call's inputs.
    """
    names, found = graphs.variables_behind(heads), []
    _check_only_outputs(heads, names)
    for call in reversed(list_alive(_calls)):
        if not names.isdisjoint(call.cut_leaves):
            found.append(call)
            names |= graphs.variables_behind(call.inputs)
    return found, names


def _check_only_outputs(heads, names):
    """Raise ValueError if heads depend on an array of a device that is no output."""
    spans = [span for span in list(_spans) if not names.isdisjoint(span.variables)]
    numbers = graphs.operators_behind(heads) if spans else []
    for span in spans:
        if any(span.first < number < span.last for number in numbers):
            raise ValueError(
                f"the loss depends on an array that {span.net} computed on one device "
                "and did not return, so the rows of other devices would not count. "
                "Return the array from the net, with one value per row."
            )


class RecordedCall:
    """A recorded call of a net on devices, alive as long as the caller's graph is."""

    def __init__(
        self,
        net: mx.gluon.Block,
        devices: Devices,
        shards: Shards,
        parameters: Sequence,
    ) -> None:
        self.parameters, self._net = parameters, net
        self._devices, self._shards = devices, shards
        self.splits_batch = shards.axis is not None  # False in a plain loop
        self._first_operator = graphs.next_operator()
        # Heads of the caller's graph before the call. They are views, because a head
        # of MXNet must not be a variable, nor occur twice.
        arrays = [x.as_nd_ndarray() for x, *_ in shards.recorded]
        self.inputs = [x.reshape(x.shape) for x in arrays]
        per_device = zip(*(column for _, column, _ in shards.recorded))
        self._device_inputs = list(per_device) or [()] * len(shards.contexts)
        self.cut_leaves: dict = {}  # variables of the caller's graph, by name
        self.heads: list = []  # the devices' outputs that a backward has reached

    def join(self, leaves: Sequence, known: dict) -> list:
        """Return the joined outputs, in the caller's graph, which keeps this object.

        `leaves` are the outputs of each device. `known` caches the names of the
        parameters' variables by context.
        """
        axis, contexts = self._shards.axis, self._shards.contexts
        if len(leaves[0]) > 1:
            leaves = list(map(_without_duplicates, leaves))
        self._device_outputs = leaves
        places = zip(contexts, leaves, self._device_inputs)
        variables = [self._check_variables(*place, known) for place in places]
        if len(contexts) > 1 or axis is None:
            names = set().union(*known.values(), *(own for own, _ in variables))
            last = graphs.next_operator()
            _spans.append(Span(name_of(self._net), self._first_operator, last, names))
        are_trained = [is_trained for _, is_trained in variables]
        columns = list(zip(*leaves))  # the shards of each output
        cut = [self._cut(column, are_trained) for column in columns]
        self._leaf_names = list(zip(*(names for names, _ in cut)))
        return [
            self._link(leaves, isinstance(column[0], mx.np.ndarray))
            if any(names)
            else join_shards(column, axis, contexts[0])
            for column, (names, leaves) in zip(columns, cut)
        ]

    def _check_variables(self, context, outputs, inputs, known):
        """Return the names of a device's inputs, and True if its graph has variables.

        Raise ValueError if a variable is neither an input nor a parameter of the net.
        """
        names = graphs.variables_behind(outputs)
        own = set(graphs.names_of(inputs)) if inputs else set()
        if context not in known or not names <= own | known[context]:
            arrays = [data for p in self.parameters for data in data_of(p)]
            here = [data for data in arrays if data.context == context]
            known[context] = set(graphs.names_of(here))
        foreign = names - own - known[context]
        if foreign:
            raise ValueError(
                f"{_holder_of(foreign, self._net)}, which {name_of(self._net)} reads, "
                "depends on a variable that is neither an argument of the call nor a "
                "parameter of the net, so its gradient would be wrong. Pass the array "
                "as an argument, or register the parameter."
            )
        return own, bool(names)

    def _cut(self, column, are_trained):
        """Return the names of an output's leaves in the caller's graph, and the leaves.

        A constant has no name.
        """
        if not isinstance(column[0], mx.nd.NDArray):
            return [None] * len(column), column
        context = self._shards.contexts[0]
        detached = [shard.detach().as_nd_ndarray() for shard in column]
        leaves = [to_context(leaf, context) for leaf in detached]
        recorded = zip(leaves, are_trained, graphs.names_of(column))
        variables = [leaf for leaf, is_trained, name in recorded if is_trained and name]
        gradients = [mx.nd.empty(x.shape, context, x.dtype) for x in variables]
        autograd.mark_variables(variables, gradients)
        names = graphs.names_of(leaves)
        self.cut_leaves.update((n, x) for n, x in zip(names, leaves) if n)
        return names, leaves

    def _link(self, leaves, is_np):
        """Join an output's leaves in a graph that keeps this object."""
        context = self._shards.contexts[0]
        failures.contexts_of_functions.add(context)
        _calls[self._first_operator] = self
        *others, last = leaves
        zero = mx.nd.zeros((1,) * last.ndim, context, last.dtype)
        zero.attach_grad("null")  # MXNet records the function, but not its backward
        last = broadcast_add(last, _GraphLifetime(self)(zero))
        joined = join_shards([*others, last], self._shards.axis, context)
        return joined.as_np_ndarray() if is_np else joined

    def backward(
        self, cut_gradients: dict, adding: Callable, train_mode: bool
    ) -> list[mx.nd.NDArray]:
        """Run backward through the devices' graphs, each in its thread.

        `cut_gradients` are the gradients, by name, of the cut leaves that a backward
        has reached. Return the gradients of `inputs`.
        """

        def backward_on(context, outputs, names, inputs):
            reached = [k for k, name in enumerate(names) if name in cut_gradients]
            heads = [outputs[k] for k in reached]
            if not graphs.variables_behind(heads):
                return [], [mx.nd.zeros_like(x.as_nd_ndarray()) for x in inputs]
            dys = [to_context(cut_gradients[names[k]], context) for k in reached]
            with adding([context]):
                dxs = write_gradients(heads, dys, inputs, train_mode)
            # Another call may have the same shards, and write to their gradients.
            return heads, [dx.copy() for dx in dxs]

        arguments = self._device_outputs, self._leaf_names, self._device_inputs
        found = self._devices.map_first(backward_on, self._shards.contexts, *arguments)
        for heads, _ in found:
            self.heads += heads
        columns = zip(*(dxs for _, dxs in found))
        return [
            join_shards(column, axis, x.context)
            for column, (x, _, axis) in zip(columns, self._shards.recorded)
        ]

    def release(self) -> None:
        """Drop the devices' graphs."""
        self._device_outputs = self._device_inputs = self.heads = self.inputs = []
        self.cut_leaves = {}
        del self._shards
        _calls.pop(self._first_operator, None)


def _without_duplicates(leaves):
    """Return a net's outputs, with views in place of duplicate recorded arrays.

    MXNet would keep only one gradient of a head that it gets twice.
    """
    entries, views = set(), []
    for leaf, entry in zip(leaves, graphs.entries_of(leaves)):
        is_duplicate = entry is not None and entry in entries
        views.append(leaf.reshape(leaf.shape) if is_duplicate else leaf)
        entries.add(entry)
    return views


def _holder_of(names, net):
    """Describe the object with an array that depends on one of the variables."""
    if any(names & call.cut_leaves.keys() for call in list_alive(_calls)):
        return "the result of a net that is parallel over other devices"
    for block in blocks_of(net):
        for attribute, value in vars(block).items():
            for leaf in flatten(value):
                is_parameter = isinstance(leaf, mx.gluon.Parameter)
                arrays = data_of(leaf) if is_parameter else [leaf]
                if not names.isdisjoint(graphs.variables_behind(arrays)):
                    return f"the attribute '{attribute}' of {name_of(block)}"
    return "an array"


class _GraphLifetime(autograd.Function):
    """A copy whose graph keeps this function, and so the call."""

    def __init__(self, call):
        super().__init__()
        self._call = call

    def forward(self, zero):
        return identity(zero)


def write_gradients(
    heads: Sequence, gradients: Sequence, variables: Sequence, train_mode: bool
) -> list[Any]:
    """Write all gradients of a graph, which is retained.

    Return the gradients of `variables`, zeros if the heads do not depend on them.
    `graphs.differentiate` with variables would write no other gradients.
    """
    if variables:
        mark_fresh(variables, False)
    graphs.differentiate(heads, gradients, (), True, train_mode)
    for variable in variables:
        if not is_fresh(variable):
            with autograd.pause():
                variable.grad[:] = 0
            mark_fresh([variable])
    return [variable.grad for variable in variables]
