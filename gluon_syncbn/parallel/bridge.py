"""A recorded call of a parallel net: part of the caller's graph and of its devices'.

It must not know where gradients are written to.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
from mxnet import autograd

from ..devices.devices import Devices, inside_map
from ..mxnet_private import graphs
from ..mxnet_private.library import broadcast_add, concat, to_context
from ..native import failures
from .batch import Batch

_calls = weakref.WeakValueDictionary()  # in order, by the name of the anchor


def any_alive() -> bool:
    """Tells whether any recorded call is alive."""
    return bool(_calls)


def calls_before(heads: Iterable) -> tuple[list[Call], set[str]]:
    """The calls that some heads depend on, the latest first, and all variables' names.

    A call's outputs are leaves, so what it was called with is looked up here.
    """
    names, found = graphs.names_behind(heads), []
    for call in reversed(_alive()):
        if call.anchor in names:
            found.append(call)
            names |= graphs.names_behind(call.inputs)
    return found, names


def _alive():
    """All calls in order; a loop over the dictionary fails if a thread changes it."""
    calls = [reference() for reference in _calls.valuerefs()]
    return [call for call in calls if call is not None]


class Call:
    """One recorded call of a net on devices, alive as long as the caller's graph is.

    In that graph the outputs are made of leaves, whose gradients are the beginning of
    the devices' backward, and the inputs are heads, whose gradients are its results.
    `columns` has for each output its shards.
    """

    def __init__(self, columns: Sequence, batch: Batch, devices: Devices) -> None:
        self.batch, self.devices = batch, devices
        self.was_in_map = inside_map()
        self.heads = list(zip(*columns))  # per device its outputs
        self._check_not_nested()
        # Views, because MXNet takes no variable as a head, and none twice.
        arrays = [x.as_nd_ndarray() for x, _ in batch.differentiable]
        self.inputs = [x.reshape(x.shape) for x in arrays]
        shards = zip(*(shards for _, shards in batch.differentiable))
        self._shards = list(shards) or [()] * len(self.heads)
        self._context, self._axis = batch.contexts[0], batch.axis
        with autograd.pause():
            self._leaves = [list(map(self._leaf, column)) for column in columns]

    @property
    def leaves(self) -> dict:
        """By name the variables of the caller's graph that stand for the outputs."""
        return {graphs.name_of(leaf): leaf for row in self._leaves for leaf in row}

    def outputs(self) -> list:
        """The whole outputs, in the caller's graph, which keeps this object."""
        anchor = mx.nd.zeros((1,), ctx=self._context)
        anchor.attach_grad("null")
        failures.function_contexts.add(self._context)
        zeros = _Keeper(self, [last for *_, last in self._leaves])(anchor)
        outputs = []
        for (*others, last), zero in zip(self._leaves, zeros):
            linked = [*others, broadcast_add(last, zero)]
            outputs.append(join(linked, self._axis, self._context))
        if isinstance(self.heads[0][0], mx.np.ndarray):
            outputs = [output.as_np_ndarray() for output in outputs]
        self.anchor = graphs.name_of(anchor)
        _calls[self.anchor] = self
        return outputs

    def _leaf(self, shard):
        leaf = to_context(shard.detach().as_nd_ndarray(), self._context)
        gradient = mx.nd.empty(leaf.shape, self._context, leaf.dtype)
        autograd.mark_variables([leaf], [gradient])
        return leaf

    def _check_not_nested(self):
        """RuntimeError if a device's graph holds the call of another parallel net."""
        nested = {call.anchor for call in _alive() if call.was_in_map}
        heads = itertools.chain(*self.heads)
        if nested and not nested.isdisjoint(graphs.names_behind(heads)):
            raise RuntimeError(
                "a net or loss that runs on each device called another parallel net, "
                "through which no gradient can return; expected that only the outer "
                "one is made parallel, and calls the other one's attribute net"
            )

    def resume(self, gradients: dict, differentiate: Callable) -> list:
        """Queues the devices' backward; returns the gradients of `inputs`.

        `gradients` are those of the leaves that a backward has reached, by name.
        `differentiate` takes a context, outputs on it, their gradients, and shards; it
        returns the gradients of the shards.
        """

        def backward(context, heads, leaves, shards):
            found = [gradients.get(graphs.name_of(leaf)) for leaf in leaves]
            reached = [k for k, dy in enumerate(found) if dy is not None]
            if not reached:
                return []
            with autograd.pause():
                dys = [to_context(found[k], context) for k in reached]
            dxs = differentiate(context, [heads[k] for k in reached], dys, shards)
            # Another call may have the same shards, and write to their gradients.
            return [dx.copy() for dx in dxs]

        per_device = self.heads, list(zip(*self._leaves)), self._shards
        shards = self.devices.map_first(backward, self.batch.contexts, *per_device)
        columns = zip(self.inputs, zip(*shards))
        return [join(column, self._axis, x.context) for x, column in columns]

    def release(self) -> None:
        """Drops the devices' graphs."""
        self.heads = self._shards = self._leaves = self.inputs = []
        _calls.pop(self.anchor, None)


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


class _Keeper(autograd.Function):
    """Zeros, one for each output: MXNet keeps the function, and so the call, as long as
    the graph.
    """

    def __init__(self, call, leaves):
        super().__init__()
        self._call = call
        self._forms = [((1,) * leaf.ndim, leaf.context, leaf.dtype) for leaf in leaves]

    def forward(self, anchor):
        return [mx.nd.zeros(*form) for form in self._forms]
