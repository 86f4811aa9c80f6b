"""Replacements for a net's `forward` that run the net on devices."""

from __future__ import annotations

import collections
import re
import threading
from contextlib import ExitStack, nullcontext
from functools import lru_cache, partial
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd

from ..arguments import check_block, comma_list, pluralize
from ..layer.convert import convert
from ..layer.finding import (
    shardwise_operators,
    synchronized_layers,
    unsynchronized_layers,
)
from ..layer.synchronization import Settings
from ..mxnet_private.arrays import flatten, rebuild
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
from ..mxnet_private.graphs import count_scopes, record_operator, scope_number
from ..mxnet_private.parameters import (
    collect_lent,
    contexts_of,
    not_replicated,
    replicate,
    set_summed,
)
from ..native import failures, steps
from ..native.failures import warn
from .backward import replace_backward
from .devices import Devices, OwnThreads, inside_map
from .recorded_call import RecordedCall, refuse_losses, variables_on
from .replicas import only_participants, unchanged
from .shards import Shards, check_independent_of_rows, describe_outputs, join_shards


class ForwardOnDevices(ForwardReplacement):
    """A net's `forward` that runs in the threads of devices."""

    def __init__(self, net: mx.gluon.Block) -> None:
        super().__init__(net)
        # False if the user has assigned to net.forward. layer/finding.py reads this.
        functions = self.replaced.values()
        self.calls_class = all(getattr(f, "calls_class", False) for f in functions)
        self._variables: dict = {}  # a cache for RecordedCall.join

    def run(
        self,
        devices: Devices,
        shards: Shards,
        parameters: Sequence,
        check: Callable[[Sequence, Sequence], None] = lambda outputs, leaves: None,
    ) -> Any:
        """Run the net on the shards; return the joined output.

        `check` is called with the devices' outputs and their leaves.
        """
        call = None
        if autograd.is_recording():
            replace_backward()
            failures.watch_process()
            call = RecordedCall(self.net, devices, shards, parameters)
        trains = autograd.is_recording() or autograd.is_training()
        arguments = zip(*shards.arguments)
        outputs = devices.map_first(self.run_replaced, *arguments, tell_ranks=trains)
        leaves = [flatten(output) for output in outputs]
        check(outputs, leaves)
        if call:
            joined = call.join(leaves, self._variables)
        else:
            axis, (context, *_) = shards.axis, shards.contexts
            joined = [join_shards(column, axis, context) for column in zip(*leaves)]
        return rebuild(outputs[0], iter(joined))


# A call that only finds out shapes must not use the devices' random generators.
_devices_for_shapes = lru_cache(maxsize=None)(OwnThreads)


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
        self._unconverted: set = set()  # names of layers that stay unsynchronized
        self._classes: dict = {}  # each block's class in the latest conversion
        # {kinds of inputs: checked descriptions of outputs, without sizes}
        self._known: dict = collections.defaultdict(set)
        self._latest_call = None, None
        self._has_checked_operators = self._has_warned_of_few_rows = False
        count_scopes()

    def __call__(self, *args: Any) -> Any:
        contexts, inputs = self.devices.contexts, flatten(args)
        if inside_map(contexts):
            return self._run_on_one_device(args)
        if is_traced(inputs):
            self._check_trace()
            return self._run_on_one_device(args)
        blocks = blocks_of(self.net)
        parameters = self.adopt_parameters(blocks)
        is_training = autograd.is_training()
        if autograd.is_recording():
            self._check_whole_batch(inputs)
        if is_training and self._has_new_layers(blocks):
            self.convert_layers(blocks)
        collect_lent(parameters)  # the program may have changed parameters on a device
        shards = Shards.split(args, inputs, contexts, self.batch_axis)
        kind = is_training, *((type(x), getattr(x, "ndim", None)) for x in inputs)
        known = self._known[kind]
        rows, expected = shards.rows, None
        has_equal_rows = len(rows) > 1 and len(set(rows)) == 1
        if has_equal_rows and not known:
            expected = self._describe_other_rows(args, shards, parameters)
        if is_training and not self._settings and max(rows) <= 2:
            self._warn_of_few_rows(max(rows))

        def check(outputs, leaves):
            if autograd.is_recording() and not self._has_checked_operators:
                self._has_checked_operators = True
                _warn_of_operators(self.net, leaves[0])
            if len(rows) == 1:
                return
            description = describe_outputs(outputs, leaves, shards)
            sizeless = re.sub(r"\d+", "n", description)  # sizes may differ by call
            if has_equal_rows and sizeless not in known:
                other = expected
                if known:
                    other = self._describe_other_rows(args, shards, parameters)
                check_independent_of_rows(description, other, rows[0])
            known.add(sizeless)

        # Layers wait for other devices only in training.
        participants: Any = nullcontext()
        if is_training and len(shards.contexts) < len(contexts):
            layers = synchronized_layers(self.net)
            participants = only_participants(layers, shards.contexts)
        with participants:
            return self.run(self.devices, shards, parameters, check)

    def summary(self, *inputs: Any) -> None:
        """Print :meth:`mxnet.gluon.Block.summary` of the net on the first device."""
        contexts, axis = self.devices.contexts[:1], self.batch_axis
        shards = Shards.split(inputs, flatten(inputs), contexts, axis)
        summary = partial(type(self.net).summary, self.net)
        with autograd.pause():
            self.devices.map_first(summary, *zip(*shards.arguments))

    def adopt_parameters(self, blocks: Sequence[mx.gluon.Block]) -> list:
        """Prepare the blocks' parameters for the devices, and return them."""
        contexts = self.devices.contexts
        # Each call does this, because the net may have changed. Gluon's collect_params
        # would take as long as queueing a small net.
        all_parameters = [p for block in blocks for p in block.params.values()]
        parameters = dict.fromkeys(all_parameters)
        for parameter in not_replicated(parameters, contexts):
            found = contexts_of(parameter)
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
            if replicate(parameter, contexts, failures.here):
                steps.guard_trainers([parameter])
        return list(parameters)

    def _run_on_one_device(self, args):
        if autograd.is_recording():
            # Backward sums no gradients over devices here, so a Trainer must sum them.
            set_summed(self.adopt_parameters(blocks_of(self.net)), False)
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

    def _check_whole_batch(self, leaves):
        """Raise ValueError if a loop over shards calls the net."""
        contexts = (x.context for x in leaves if isinstance(x, mx.nd.NDArray))
        context = next(contexts, None)
        latest_scope, latest = self._latest_call
        scope = threading.get_ident(), scope_number()
        self._latest_call = scope, context
        is_loop = latest_scope == scope and latest != context
        if is_loop and {latest, context} <= set(self.devices.contexts):
            raise ValueError(
                f"net was called with arrays on {latest} and then with arrays on "
                f"{context} in one autograd.record() block. A parallel net splits its "
                "batch itself, so pass the whole batch in one call, without "
                "split_and_load."
            )

    def convert_layers(self, blocks: Sequence[mx.gluon.Block]) -> None:
        if self._settings:
            convert(self.net, self._settings)
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

    def _warn_of_few_rows(self, rows):
        if self._has_warned_of_few_rows:
            return
        self._has_warned_of_few_rows = True
        found = unsynchronized_layers(self.net)
        if found:
            warn(
                f"with sync_bn=False {found[0]} normalizes each device's "
                f"{pluralize(rows, 'row')} alone, so its running statistics are "
                "inaccurate. Call make_parallel with sync_bn=True, or pass more rows."
            )

    def _describe_other_rows(self, args, shards, parameters):
        """Describe the first device's outputs for another number of rows.

        An output without a batch axis may by chance be as long as each shard. A call
        with another number of rows detects this, because the output keeps its length.
        Return None if the net fails, because GluonCV's R-CNN accepts only one number of
        rows.
        """
        contexts, count = self.devices.contexts, 3 if shards.rows[0] == 2 else 2
        first, devices = contexts[:1], _devices_for_shapes(tuple(contexts))
        begin = record_operator() if autograd.is_recording() else None

        def run(*args):
            try:
                return self.run_replaced(*args)
            except Exception:  # noqa: BLE001
                return None  # raising here would cancel pending work

        few = Shards.split(args, flatten(args), first, self.batch_axis, count)
        with ExitStack() as stack:
            if autograd.is_training():
                stack.enter_context(unchanged(parameters))
                layers = synchronized_layers(self.net)
                # Other ranks may not make this call, so layers do not wait for them.
                participants = only_participants(layers, first, is_isolated=True)
                stack.enter_context(participants)
            (output,) = devices.map_first(run, *zip(*few.arguments))
            # A static graph keeps the random generator of its first thread.
            self.net.apply(forget_graph)
        if begin is not None:
            refuse_losses(self.net, begin, variables_on(first[0], parameters))
        if output is None:
            return None
        return describe_outputs([output], [flatten(output)], few, needs_rows=False)


def is_parallel(net: Any) -> bool:
    return isinstance(vars(net).get("forward"), ParallelForward)


def check_not_parallel(net: Any, function: str) -> None:
    check_block("net", net)
    if is_parallel(net):
        raise ValueError(
            f"net must not be parallel yet for {function}, got a net over "
            f"{comma_list(net.devices.contexts)}. Call revert_parallel(net) first."
        )


def _warn_of_operators(net, outputs):
    names = shardwise_operators(net, outputs)
    if names:
        warn(
            f"the gradients of {comma_list(names)} use a count or mean of one shard, "
            "not of the whole batch. Set normalization='null' in operators that have "
            "it, and call trainer.step(rows) to divide by the number of rows."
        )
