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

import collections
import itertools
import weakref
from itertools import compress
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
from mxnet import autograd

from ..common.nested import flatten, rebuild
from ..devices.devices import Devices
from ..mxnet_private import graphs
from ..mxnet_private.blocks import blocks_of, name_of
from ..mxnet_private.library import broadcast_add, to_context
from ..mxnet_private.parameters import data_of
from ..native import failures
from ..native.steps import alive
from .gradients import differentiate
from .shards import Shards, join

_calls = weakref.WeakValueDictionary()  # in order, by the name of the lifetime anchor


class Span:
    """The operators that a net records on devices while this object is not ended.

    They have numbers between `first` and `last`; `variables` are the names of all
    variables that their graphs may have.
    """

    def __init__(self, net: mx.gluon.Block) -> None:
        self.net, self.first = name_of(net), graphs.next_operator()

    def end(self, variables: set) -> None:
        """Refuse losses that depend on these operators from now on."""
        self.variables, self.last = variables, graphs.next_operator()
        _spans.append(self)


# A part of a device's graph that the net has kept may outlive the call.
_spans: Any = collections.deque(maxlen=100)


def any_recorded() -> bool:
    """Return True if the graph of any net was cut."""
    return bool(_calls or _spans)


def calls_before(heads: Iterable) -> tuple[list[RecordedCall], set[str]]:
    """Return the calls that heads depend on, the latest first, and all variables.

    A call's outputs are variables, so what it was called with is looked up here.
    """
    names, found = graphs.names_behind(heads), []
    _check_results(heads, names)
    for call in reversed(alive(_calls)):
        if call.lifetime_anchor in names:
            found.append(call)
            names |= graphs.names_behind(call.inputs)
    return found, names


def _check_results(heads, names):
    """ValueError if heads reach a device's graph by another way than its results."""
    spans = [span for span in list(_spans) if not names.isdisjoint(span.variables)]
    numbers = graphs.operators_behind(heads) if spans else []
    for span in spans:
        if any(span.first < number < span.last for number in numbers):
            raise ValueError(
                f"the loss depends on an array that {span.net} computed on a device, "
                "but did not return, where the rows of the other devices would not "
                "count. Return it from the net, with one value a row."
            )


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
    is_parallel : bool
        False in a plain loop, whose caller has split the batch.
    heads : list of NDArray
        The devices' outputs that a backward has reached.
    """

    def __init__(
        self,
        net: mx.gluon.Block,
        devices: Devices,
        shards: Shards,
        parameters: Sequence,
    ) -> None:
        self.parameters, self._net = parameters, net
        self._devices, self._shards = devices, shards
        self.is_parallel = shards.axis is not None
        self._anchor = mx.nd.zeros((1,), ctx=shards.contexts[0])
        self._anchor.attach_grad("null")
        self.lifetime_anchor = graphs.name_of(self._anchor)
        self._span = Span(net)
        # Views, because MXNet takes no variable as a head, and none twice.
        arrays = [x.as_nd_ndarray() for x, *_ in shards.recorded]
        self.inputs = [x.reshape(x.shape) for x in arrays]
        per_device = zip(*(column for _, column, _ in shards.recorded))
        self._device_inputs = list(per_device) or [()] * len(shards.contexts)
        self.cut_leaves: dict = {}
        self.heads: list = []

    def whole(self, outputs: Sequence, known: dict) -> Any:
        """Return the whole outputs, in the caller's graph, which keeps this object.

        `outputs` has what the net returned on each device. `known` has by context the
        names of the parameters' variables, as far as earlier calls have met them.
        """
        axis, contexts = self._shards.axis, self._shards.contexts
        columns = list(zip(*map(flatten, outputs)))  # by output the shards
        self._device_outputs = list(zip(*columns))
        places = zip(contexts, self._device_outputs, self._device_inputs)
        is_trained = [self._is_trained(*place, known) for place in places]
        if len(contexts) > 1 or axis is None:
            inputs = map(graphs.name_of, itertools.chain(*self._device_inputs))
            self._span.end(set(inputs).union(*known.values()))
        with autograd.pause():
            cut = [list(map(self._cut_leaf, c, is_trained)) for c in columns]
        self._leaf_names = list(zip(*([name for name, _ in c] for c in cut)))
        is_cut = [any(name for name, _ in c) for c in cut]
        linked = iter(self._link([[x for _, x in c] for c in compress(cut, is_cut)]))
        wholes = [
            next(linked) if cut_here else join(column, axis, contexts[0])
            for column, cut_here in zip(columns, is_cut)
        ]
        return rebuild(outputs[0], iter(wholes))

    def _is_trained(self, context, outputs, inputs, known):
        """Return True if a device's graph has a variable.

        ValueError if a variable is neither an input nor a parameter of the net.
        """
        names = graphs.variables_behind(outputs)
        own = set(map(graphs.name_of, inputs))
        if context not in known or not names <= own | known[context]:
            known[context] = variables_on(context, self.parameters)
        foreign = names - own - known[context]
        if foreign:
            raise ValueError(
                f"{name_of(self._net)} reads {_holder_of(foreign, self._net)}, which "
                "depends on a variable that is neither an argument of the call nor a "
                "parameter of the net, so that its gradient would be one device's. "
                "Pass the array as an argument, or register the parameter."
            )
        return bool(names)

    def _cut_leaf(self, shard, is_trained):
        """Return the name of a new variable, None for a constant, and its array."""
        if not isinstance(shard, mx.nd.NDArray):
            return None, shard
        leaf = to_context(shard.detach().as_nd_ndarray(), self._shards.contexts[0])
        if not is_trained or not graphs.is_recorded(shard):
            return None, leaf
        gradient = mx.nd.empty(leaf.shape, leaf.context, leaf.dtype)
        autograd.mark_variables([leaf], [gradient])
        name = graphs.name_of(leaf)
        self.cut_leaves[name] = leaf
        return name, leaf

    def _link(self, columns):
        """Join the leaves of each output in a graph that keeps this object."""
        if not columns:
            return
        context = self._shards.contexts[0]
        failures.function_contexts.add(context)
        zeros = _GraphLifetime(self, [last for *_, last in columns])(self._anchor)
        _calls[self.lifetime_anchor] = self
        is_np = isinstance(self._device_outputs[0][0], mx.np.ndarray)
        for (*others, last), zero in zip(columns, zeros):
            leaves = [*others, broadcast_add(last, zero)]
            whole = join(leaves, self._shards.axis, context)
            yield whole.as_np_ndarray() if is_np else whole

    def backward(
        self, cut_gradients: dict, adding: Callable, train_mode: bool
    ) -> list[mx.nd.NDArray]:
        """Differentiate the devices' graphs, each in its thread.

        `cut_gradients` has by name the gradients of the cut leaves that a backward has
        reached. Returns the gradients of `inputs`.
        """

        def differentiate_on(context, outputs, names, inputs):
            reached = [k for k, name in enumerate(names) if name in cut_gradients]
            heads = [outputs[k] for k in reached]
            if not graphs.variables_behind(heads):
                return [], [mx.nd.zeros_like(x.as_nd_ndarray()) for x in inputs]
            with autograd.pause():
                dys = [to_context(cut_gradients[names[k]], context) for k in reached]
            with adding([context]):
                dxs = differentiate(heads, dys, inputs, train_mode)
            # Another call may have the same shards, and write to their gradients.
            return heads, [dx.copy() for dx in dxs]

        arguments = self._device_outputs, self._leaf_names, self._device_inputs
        found = self._devices.map_first(
            differentiate_on, self._shards.contexts, *arguments
        )
        for heads, _ in found:
            self.heads += heads
        columns = zip(*(dxs for _, dxs in found))
        return [
            join(column, axis, x.context)
            for column, (x, _, axis) in zip(columns, self._shards.recorded)
        ]

    def release(self) -> None:
        """Drop the devices' graphs."""
        self._device_outputs = self._device_inputs = self.heads = self.inputs = []
        self.cut_leaves = {}
        del self._shards
        _calls.pop(self.lifetime_anchor, None)


def variables_on(context: mx.Context, parameters: Iterable) -> set[str | None]:
    """Return the names of some parameters' variables on a context."""
    arrays = [data for parameter in parameters for data in data_of(parameter)]
    return {graphs.name_of(data) for data in arrays if data.context == context}


def without_twins(output: Any) -> Any:
    """Return a net's output in which no recorded array stands twice.

    MXNet keeps one gradient only of a head that it is given twice.
    """
    entries = set()

    def view(leaf):
        entry = graphs.entry_of(leaf)
        if entry is None or entry not in entries:
            entries.add(entry)
            return leaf
        return leaf.reshape(leaf.shape)

    return rebuild(output, map(view, flatten(output)))


def _holder_of(names, net):
    """Return in words what holds an array that depends on one of some variables."""
    if not all(names.isdisjoint(call.cut_leaves) for call in alive(_calls)):
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
    """Zeros, one for each output: MXNet keeps the function, and so the call, as long as
    the graph.
    """

    def __init__(self, call, leaves):
        super().__init__()
        self._call = call
        self._forms = [((1,) * leaf.ndim, leaf.context, leaf.dtype) for leaf in leaves]

    def forward(self, anchor):
        return [mx.nd.zeros(*form) for form in self._forms]
