"""Replacements for a net's `forward` that run the net on devices."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd

from ..arguments import comma_list
from ..layer.convert import convert
from ..layer.finding import synchronized_layers, unsynchronized_layers
from ..layer.synchronization import Settings
from ..mxnet_private.blocks import (
    ForwardReplacement,
    add_pre_hook,
    blocks_of,
    forget_graph,
    is_hybridized,
    is_traced,
    name_of,
    traced_block,
)
from ..mxnet_private.owners import (
    Variables,
    copy_owners,
    is_replicated,
    replicate,
    set_summed,
    stale_parameters,
)
from ..mxnet_private.parameters import contexts_of, is_dense
from ..mxnet_private.tape import install_backward
from ..native.failures import watch_process
from ..native.guarded_trainers import guard_trainers
from ..native.program_lines import warn
from ..native.turns import here
from ..nested import flatten, rebuild
from .backward import run_backward
from .devices import Devices, inside_map
from .participants import only_participants
from .recorded_call import RecordedCall
from .shards import Shards, check_outputs, join_shards


class ForwardOnDevices(ForwardReplacement):
    """A net's `forward` that runs in the threads of devices."""

    def __init__(self, net: mx.gluon.Block) -> None:
        super().__init__(net)
        # False if the user has assigned to net.forward. layer/norm_kinds.py reads it.
        functions = self.replaced.values()
        self.calls_class = all(getattr(f, "calls_class", False) for f in functions)
        self.variables = Variables()

    def run(
        self, devices: Devices, shards: Shards, update_parameters: Callable[[], Any]
    ) -> Any:
        """Run the net on the shards; return the joined output.

        `update_parameters` is called after the devices, because their calls may make
        layers. It sets the parameters of `variables`, and returns them.
        """
        call = None
        if autograd.is_recording():
            install_backward(run_backward)
            watch_process()
            call = RecordedCall(self.net, devices, shards)
        trains = autograd.is_recording() or autograd.is_training()
        arguments = zip(*shards.arguments)
        outputs = devices.map_first(self.run_replaced, *arguments, tell_ranks=trains)
        leaves = [flatten(output) for output in outputs]
        if len(leaves) > 1:
            check_outputs(outputs, leaves, shards)
        if call:
            known = update_parameters()
            if shards.axis is not None:
                set_summed(known, True)
            joined = call.join(leaves, self.variables.by_context)
        else:
            axis, (context, *_) = shards.axis, shards.contexts
            joined = [join_shards(column, axis, context) for column in zip(*leaves)]
        return rebuild(outputs[0], iter(joined))


class ParallelForward(ForwardOnDevices):
    """A net's `forward` that splits whole batches over devices."""

    def __init__(
        self,
        net: mx.gluon.Block,
        devices: Devices,
        batch_axis: int,
        settings: Settings | None,
    ) -> None:
        super().__init__(net)
        self.devices, self.batch_axis = devices, batch_axis
        self._settings = settings  # None if layers are not converted
        self.arguments: dict = {}  # the arguments of make_parallel
        self._unconverted: set = set()  # names of layers that stay unsynchronized
        self._classes: dict = {}  # each block's class in the latest conversion
        self._has_predicted = False  # True if a prediction may be pending

    def __call__(self, *args: Any) -> Any:
        contexts, inputs = self.devices.contexts, flatten(args)
        if inside_map(contexts):
            return self._run_on_one_device(args)
        if is_traced(inputs):
            self._check_trace()
            return self._run_on_one_device(args)
        blocks, is_training = blocks_of(self.net), autograd.is_training()
        parameters = self.adopt_parameters(blocks)
        if is_training and self._has_new_layers(blocks):
            self.convert_layers(blocks)
        shards = Shards.split(args, inputs, contexts, self.batch_axis)
        self._copy_owners(parameters)
        participants: Any = nullcontext()
        if not is_training:  # layers do not wait for other devices
            self._has_predicted = True
        elif len(shards.contexts) < len(contexts):
            layers = synchronized_layers(self.net)
            participants = only_participants(layers, shards.contexts)

        def after_call():
            now = blocks_of(self.net)
            if now == blocks:
                self.variables.update(parameters, self._adopt)
                return parameters
            if is_training and self._has_new_layers(now):
                self._warn_of_new_layers()
            return self.adopt_parameters(now)

        with participants:
            return self.run(self.devices, shards, after_call)

    def _copy_owners(self, parameters):
        stale = stale_parameters(parameters)
        if stale and self._has_predicted:
            # oneDNN changes the layout of weights in predictions, in place, in work for
            # which a copy does not wait.
            mx.nd.waitall()
            self._has_predicted = False
        copy_owners(stale)

    def summary(self, *inputs: Any) -> None:
        """Print :meth:`mxnet.gluon.Block.summary` of the net on the first device."""
        contexts, axis = self.devices.contexts[:1], self.batch_axis
        shards = Shards.split(inputs, flatten(inputs), contexts, axis)
        summary = partial(type(self.net).summary, self.net)
        with autograd.pause():
            self.devices.map_first(summary, *zip(*shards.arguments))

    def adopt_parameters(self, blocks: Sequence[mx.gluon.Block]) -> list:
        """Prepare the blocks' parameters for the devices, and return them.

        If the arrays of a parameter were replaced, graphs are made anew: a static_shape
        graph would use the former arrays.
        """
        # Each call does this, because the net may have changed. Gluon's collect_params
        # would take as long as queueing a small net.
        found = dict.fromkeys(p for block in blocks for p in block.params.values())
        if self.variables.update(found, self._adopt):
            self.net.apply(forget_graph)
        return list(found)

    def _adopt(self, parameter):
        contexts, found = self.devices.contexts, contexts_of(parameter)
        if found and set(found) != set(contexts):
            fix = (
                "Pass ctx=net.devices.contexts where parameters are initialized or "
                "loaded, or call "
                "net.collect_params().reset_ctx(net.devices.contexts)."
            )
            if not is_parallel(self.net):
                fix = "Call make_parallel(net, ctx, reset_ctx=True) to move them."
            raise ValueError(
                f"parameter '{parameter.name}' must be initialized on "
                f"{comma_list(contexts)}, got {comma_list(found)}. {fix}"
            )
        if is_dense(parameter) and not is_replicated(parameter):
            replicate(parameter, here)
            guard_trainers([parameter])
        set_summed([parameter], False)  # new arrays have no gradient yet

    def _run_on_one_device(self, args):
        parameters = self.adopt_parameters(blocks_of(self.net))
        if inside_map() and mx.context.current_context() == here.contexts[0]:
            copy_owners(stale_parameters(parameters))  # before any device runs the net
        if autograd.is_recording():
            # Backward sums no gradients over devices here, so a Trainer must sum them.
            set_summed(parameters, False)
        return self.run_replaced(*args)

    def _check_trace(self):
        # Later calls of the parent run its graph, not this net, so a hook checks them.
        parent = traced_block()
        if parent is not None and is_hybridized(parent):
            self._check_parent(parent)
            add_pre_hook(parent, self._check_parent)

    def _check_parent(self, parent, _inputs=()):
        contexts = self.devices.contexts
        if is_parallel(parent) and parent.devices.contexts == contexts:
            return  # the parent calls this net with shards
        runs_graph = is_hybridized(parent) and not inside_map(contexts)
        if runs_graph and is_parallel(self.net) and autograd.is_training():
            outer = name_of(parent)
            raise RuntimeError(
                f"{outer} is hybridized, and its graph would run the parallel net "
                f"{name_of(self.net)} on one device. Call make_parallel with {outer} "
                "instead."
            )

    def convert_layers(self, blocks: Sequence[mx.gluon.Block]) -> None:
        if self._settings:
            convert(self.net, self._settings, keeps_own=True)
            self._unconverted = set(unsynchronized_layers(self.net))
            self._classes = {block: type(block) for block in blocks}

    def _has_new_layers(self, blocks):
        if not self._settings:
            return False
        # A SymbolBlock's layers are nodes of its graph, which the classes do not show.
        has_graphs = any(isinstance(block, mx.gluon.SymbolBlock) for block in blocks)
        if not has_graphs and self._classes == {b: type(b) for b in blocks}:
            return False
        return not set(unsynchronized_layers(self.net)) <= self._unconverted

    def _warn_of_new_layers(self):
        new = set(unsynchronized_layers(self.net)) - self._unconverted
        warn(
            f"the call has made {comma_list(sorted(new))}, which normalized each "
            "device's rows alone. The next training call converts it to SyncBatchNorm. "
            "Make all layers before the first call."
        )


def is_parallel(net: Any) -> bool:
    return isinstance(vars(net).get("forward"), ParallelForward)
