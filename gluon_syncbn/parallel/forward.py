"""Takes the place of a net's `forward`: runs it on whole batches, on all devices.

A call splits the batch, runs the net on every device through ``Devices.map``, and
gathers the outputs; ``backward.py`` carries gradients back. It must not know what the
net computes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ContextManager

import mxnet as mx
from mxnet import autograd

from ..common.arguments import check_block, comma_list
from ..common.nested import arrays_in
from ..devices.devices import Devices, inside_map
from ..mxnet_private.blocks import (
    blocks_of,
    current_trace,
    is_traced,
    name_of,
    own_forward,
    restore_forward,
    run_forward,
)
from ..mxnet_private.parameters import contexts_of, save_value_of
from . import backward, warn
from .participation import participating
from .shards import Shards


class ReplacedForward:
    """Replaces a net's `forward` on the instance, where hooks and copies keep it."""

    def __init__(self, net: mx.gluon.Block) -> None:
        self.net = net
        self._former = own_forward(net)
        self.calls_class = not self._former

    def own(self, *args: Any) -> Any:
        """Calls the forward that is replaced."""
        return run_forward(self.net, self._former, args)

    def remove(self) -> None:
        """Restores the former one."""
        restore_forward(self.net, self._former)


class ParallelForward(ReplacedForward):
    """Runs a net on whole batches, on its devices."""

    def __init__(
        self, net: mx.gluon.Block, devices: Devices, batch_axis: int, sync_bn: bool
    ) -> None:
        super().__init__(net)
        self.devices, self.batch_axis = devices, batch_axis
        self._synchronizes = sync_bn

    def __call__(self, *args: Any) -> Any:
        contexts = self.devices.contexts
        if inside_map(contexts) or self._is_traced(args):
            return self.own(*args)
        parameters = self.parameters()
        if autograd.is_recording():
            warn.of_trainer(parameters)
        shards = Shards.split(args, contexts, self.batch_axis)
        participants: ContextManager = nullcontext()
        # Only in training do devices wait for each other.
        if autograd.is_training() and len(shards.contexts) < len(contexts):
            participants = participating(self.net, shards.contexts)
        with participants:
            outputs = self.devices.map_first(
                lambda arguments: self.own(*arguments), shards.arguments
            )
        if autograd.is_recording():
            warn.of_operators(self.net, arrays_in(outputs[:1]))
        if autograd.is_training() and not self._synchronizes:
            warn.of_few_rows(self.net, shards.rows)
        return backward.gather(outputs, shards, self.devices, parameters)

    def summary(self, *inputs: Any) -> None:
        """As :meth:`mxnet.gluon.Block.summary`: of the net on the first device."""
        shards = Shards.split(inputs, self.devices.contexts[:1], self.batch_axis)
        summary = partial(type(self.net).summary, self.net)
        with autograd.pause():
            self.devices.map_first(lambda args: summary(*args), shards.arguments)

    def parameters(self) -> list:
        """The net's parameters; raises ValueError if one is initialized elsewhere."""
        contexts = self.devices.contexts
        # Asked in each call, for the net may have been changed; Gluon's collect_params
        # is as slow as pushing a small net.
        parameters = dict.fromkeys(
            parameter
            for block in blocks_of(self.net)
            for parameter in block.params.values()
        )
        for parameter in parameters:
            found = contexts_of(parameter)
            if found and found != contexts and set(found) != set(contexts):
                cure = "make_parallel(..., reset_ctx=True) moves a net"
                if is_parallel(self.net):
                    cure = (
                        "revert_parallel(net), and make_parallel(..., reset_ctx=True) "
                        "moves it"
                    )
                raise ValueError(
                    f"parameter '{parameter.name}' is initialized on "
                    f"{comma_list(found)}, expected {comma_list(contexts)}; {cure}"
                )
            save_value_of(parameter, contexts[0])
        return list(parameters)

    def _is_traced(self, args):
        """Tells whether a call is part of a graph; raises if that cannot train."""
        if not is_traced(args):
            return False
        trace = current_trace()
        if trace and trace.is_hybridized and autograd.is_training():
            raise RuntimeError(
                f"{name_of(trace.block)} is hybridized, and its graph would run the "
                f"parallel net {name_of(self.net)} on one device: expected that "
                "make_parallel is called with the outer one"
            )
        return True


def is_parallel(net: Any) -> bool:
    """Tells whether :func:`make_parallel` was called with a net."""
    return isinstance(vars(net).get("forward"), ParallelForward)


def check_not_parallel(net: Any, function: str) -> None:
    """Raises an error unless `net` is a Block that is not parallel yet."""
    check_block("net", net)
    if is_parallel(net):
        raise ValueError(
            f"net is parallel already, over {comma_list(net.devices.contexts)}, and "
            f"needs no {function}: expected another one, or revert_parallel(net) before"
        )
