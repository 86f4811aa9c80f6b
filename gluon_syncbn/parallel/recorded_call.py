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

import weakref
from itertools import compress
from typing import Iterable, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private import tape
from ..mxnet_private.arrays import broadcast_add, to_context
from ..mxnet_private.blocks import blocks_of, name_of
from ..mxnet_private.owners import check_no_copies
from ..mxnet_private.parameters import data_of
from ..native.library import load
from ..nested import flatten
from .devices import Devices
from .shards import Shards, join_shards

_calls = weakref.WeakValueDictionary()  # {id: RecordedCall} in the order of calls


def calls_behind(heads: Iterable) -> tuple[list[RecordedCall], set[str]]:
    """Return the calls, the latest first, and the variables that heads depend on."""
    names, found = tape.variables_behind(heads), []
    check_no_copies(names)
    for call in reversed(_living_calls()):
        if not names.isdisjoint(call.cut_leaves):  # then search behind its inputs
            found.append(call)
            names |= tape.variables_behind(call.inputs)
    return found, names


def _living_calls():
    # The values could not be listed while another thread adds one.
    return [call for reference in _calls.valuerefs() if (call := reference())]


class RecordedCall:
    """A recorded call of a net. It lives as long as the graph of its outputs."""

    def __init__(self, net: mx.gluon.Block, devices: Devices, shards: Shards) -> None:
        self._net, self.devices, self._shards = net, devices, shards
        self.splits_batch = shards.axis is not None
        # Backward uses these views as heads. MXNet accepts no variable as a head.
        self.inputs = [x.reshape(x.shape) for x, *_ in shards.recorded]
        per_device = zip(*(column for _, column, _ in shards.recorded))
        named = [dict(zip(tape.names_of(xs), xs)) for xs in per_device]
        self._device_inputs = named or [{}] * len(shards.contexts)
        self.cut_leaves: dict = {}  # {name: detached output, a variable}
        self.heads: list = []  # the devices' outputs that the latest backward reached

    def join(self, outputs: Sequence, variables: dict) -> list:
        """Join the devices' outputs in the caller's graph, which then owns this object.

        `variables` are the parameters' variables by context and name.
        """
        if len(outputs[0]) > 1:
            outputs = list(map(_distinct_heads, outputs))
        self._device_outputs = outputs
        self._variables = [variables.get(c, {}) for c in self._shards.contexts]
        found = [tape.symbols_of(each) for each in outputs]
        own = zip(found, self._device_inputs, self._variables)
        have_variables = [self._check_variables(*each) for each in own]
        joined = []
        for shards, symbols in zip(zip(*outputs), zip(*found)):
            pairs = zip(have_variables, symbols)
            are_variables = [has and symbol is not None for has, symbol in pairs]
            joined.append(self._join_output(shards, are_variables))
        self._leaf_names = list(zip(*(names for _, names in joined)))
        return [output for output, _ in joined]

    def _check_variables(self, symbols, inputs, parameters):
        """Return True if a device's graphs have variables; raise if one is foreign."""
        names = tape.variables_behind((), symbols)
        foreign = names - inputs.keys() - parameters.keys()
        if foreign:
            raise ValueError(
                f"{_holder_of(foreign, self._net)}, which {name_of(self._net)} reads, "
                "depends on a variable that is neither an argument of the call nor a "
                "parameter of the net, so its gradient would be wrong. Pass the array "
                "as an argument, or register the parameter."
            )
        return bool(names)

    def _join_output(self, shards, are_variables):
        """Return a joined output, and for each device the cut leaf's name or None."""
        axis, context = self._shards.axis, self._shards.contexts[0]
        if not any(are_variables):
            return join_shards(shards, axis, context), [None] * len(shards)
        leaves = [shard.detach().as_nd_ndarray() for shard in shards]
        places = self._shards.contexts
        if context.device_type == "gpu":
            leaves = [to_context(leaf, context) for leaf in leaves]
            places = [context] * len(leaves)
        pairs = list(compress(zip(leaves, places), are_variables))
        variables = [leaf for leaf, _ in pairs]
        gradients = [mx.nd.empty(x.shape, place, x.dtype) for x, place in pairs]
        autograd.mark_variables(variables, gradients)
        names = tape.names_of(leaves)
        self.cut_leaves.update((n, x) for n, x in zip(names, leaves) if n)
        _calls[id(self)] = self
        set_flag = load().gluon_syncbn_set_flag
        zero = tape.owning_zero(self, leaves[0], set_flag)
        leaves[0] = broadcast_add(leaves[0], zero)
        output = join_shards(leaves, axis, context)
        is_np = isinstance(shards[0], mx.np.ndarray)
        return output.as_np_ndarray() if is_np else output, names

    def backward(
        self, cut_gradients: dict, train_mode: bool
    ) -> tuple[list, list, list]:
        """Run backward through each device's graph, in the device's thread.

        Return (variable, gradient) for each device's parameters, the inputs that have
        gradients, and their gradients.
        """

        def backward_on(context, outputs, names, inputs, parameters):
            reached = [k for k, name in enumerate(names) if name in cut_gradients]
            heads = [outputs[k] for k in reached]
            behind = tape.variables_behind(heads)
            if not behind:
                return [], [], {}
            dys = [cut_gradients[names[k]] for k in reached]
            dys = [
                dy if dy.context == context else to_context(dy, context) for dy in dys
            ]
            variables = [parameters[name] for name in parameters if name in behind]
            xs = {name: x for name, x in inputs.items() if name in behind}
            arrays = [v.arrays[v.place] for v in variables] + list(xs.values())
            found = tape.differentiate(heads, dys, arrays, True, train_mode)
            dxs = dict(zip(xs, found[len(variables) :]))
            return heads, list(zip(variables, found)), dxs

        own = self._device_outputs, self._leaf_names, self._device_inputs
        contexts = self._shards.contexts
        found = self.devices.map_first(backward_on, contexts, *own, self._variables)
        self.heads = [head for heads, *_ in found for head in heads]
        inputs, gradients = [], []
        for number, (_, shards, axis) in enumerate(self._shards.recorded):
            names = [list(xs)[number] for xs in self._device_inputs]
            dxs = [dxs.get(name) for name, (*_, dxs) in zip(names, found)]
            if any(dx is not None for dx in dxs):
                pairs = zip(dxs, shards)
                filled = [mx.nd.zeros_like(y) if dx is None else dx for dx, y in pairs]
                x = self.inputs[number]
                inputs.append(x)
                gradients.append(join_shards(filled, axis, x.context))
        return [pair for _, pairs, _ in found for pair in pairs], inputs, gradients


def _distinct_heads(outputs):
    """Replace duplicates by views; MXNet uses only one gradient of a repeated head."""
    names, heads = set(), []
    for output, name in zip(outputs, tape.names_of(outputs)):
        is_duplicate = name is not None and name in names
        heads.append(output.reshape(output.shape) if is_duplicate else output)
        names.add(name)
    return heads


def _holder_of(names, net):
    if any(names & call.cut_leaves.keys() for call in _living_calls()):
        return "the result of a net that is parallel over other devices"
    for block in blocks_of(net):
        for attribute, value in vars(block).items():
            for item in flatten(value):
                is_parameter = isinstance(item, mx.gluon.Parameter)
                arrays = data_of(item) if is_parameter else [item]
                if not names.isdisjoint(tape.variables_behind(arrays)):
                    return f"the attribute '{attribute}' of {name_of(block)}"
    return "an array"
