"""The functions that take the place of a net's `forward`, and run it on devices."""

from __future__ import annotations

import collections
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd

from ..arguments import check_block, comma_list, pluralize
from ..devices.devices import Devices, inside_map, restricted
from ..devices.workers import Workers
from ..layer.convert import convert
from ..layer.finding import synchronized_layers, unsynchronized_layers
from ..layer.synchronization import Settings
from ..mxnet_private.arrays import flatten, rebuild
from ..mxnet_private.blocks import (
    blocks_of,
    current_trace,
    forget_graph,
    is_traced,
    name_of,
    own_forward,
    restore_forward,
    run_forward,
)
from ..mxnet_private.graphs import block_number, count_blocks_for
from ..mxnet_private.parameters import (
    collect_lent,
    contexts_of,
    data_of,
    not_adopted,
)
from ..native import failures
from . import replicas, warn
from .backward import replace_backward
from .recorded_call import RecordedCall, Span, variables_on, without_twins
from .shards import Shards, common_form, form_of_arguments, join, structure


class _Lookers(Devices):
    """Devices whose threads have random generators of their own."""

    _workers = Workers()


class ReplacedForward:
    """Replaces a net's `forward` on the instance, where hooks and copies keep it."""

    def __init__(self, net: mx.gluon.Block) -> None:
        self.net = net
        self._former = own_forward(net)
        former = self._former.values()
        self.calls_class = all(getattr(f, "calls_class", False) for f in former)
        self._variables: dict = {}  # see RecordedCall.whole

    def own(self, *args: Any) -> Any:
        """Call the forward that is replaced."""
        return run_forward(self.net, self._former, args)

    def remove(self) -> None:
        """Restore the former one."""
        restore_forward(self.net, self._former)

    def run(
        self,
        devices: Devices,
        shards: Shards,
        parameters: Sequence,
        check: Callable = lambda outputs, leaves: None,
    ) -> Any:
        """Run the net on its devices; return its whole outputs, recorded by autograd.

        `check` is called with what the net returned on each device, and its leaves.
        """
        if not autograd.is_recording():
            outputs, leaves = zip(*devices.map_first(self._call, shards.arguments))
            check(outputs, leaves)
            wholes = (join(c, shards.axis, shards.contexts[0]) for c in zip(*leaves))
            return rebuild(outputs[0], wholes)
        replace_backward()
        failures.watch_process()
        call = RecordedCall(self.net, devices, shards, parameters)
        outputs, leaves = zip(*devices.map_first(self._call, shards.arguments))
        check(outputs, leaves)
        return rebuild(outputs[0], iter(call.whole(leaves, self._variables)))

    def _call(self, args):
        """Return what the net returns on this thread's device, and its leaves."""
        output = run_forward(self.net, self._former, args)
        leaves = flatten(output)
        if len(leaves) > 1 and autograd.is_recording():
            leaves = without_twins(leaves)
        return output, leaves


class ParallelForward(ReplacedForward):
    """Runs a net on whole batches, on its devices."""

    def __init__(
        self,
        net: mx.gluon.Block,
        devices: Devices,
        batch_axis: int,
        settings: Settings | None,
    ) -> None:
        super().__init__(net)
        self.devices, self.batch_axis = devices, batch_axis
        self._lookers = _Lookers(devices.contexts)
        self._settings = settings  # for layers, which are converted if there are any
        self._unconverted: set = set()
        self._forms: dict = collections.defaultdict(set)
        self._latest = None, None
        self._adopted: dict = {}  # by parameter its arrays in the latest call
        count_blocks_for(self)

    def __call__(self, *args: Any) -> Any:
        contexts, leaves = self.devices.contexts, flatten(args)
        if inside_map(contexts) or self._is_traced(leaves):
            if autograd.is_recording():  # each device's backward writes its part
                replicas.note_parts(list(self._adopted))
            return self.own(*args)
        parameters = self.parameters()
        if autograd.is_recording():
            self._check_whole_batch(leaves)
        if autograd.is_training() and self._settings:
            if not self._unsynchronized() <= self._unconverted:
                self.convert_layers()  # some have come since the last call
        collect_lent(parameters)
        shards = Shards.split(args, leaves, contexts, self.batch_axis)
        form_of_call = form_of_arguments(args, leaves, self.batch_axis)
        known = self._forms[form_of_call, autograd.is_training()]
        expected, is_even = None, shards.is_even
        if is_even and not known:
            expected = self._form_of_other_rows(args, shards, parameters)

        def check(outputs, leaves):
            if autograd.is_recording():
                warn.of_operators(self.net, leaves[0])
            if len(shards.contexts) > 1:
                form = common_form(outputs, leaves, shards)
                known_form = structure(form)
                if is_even and known_form not in known:
                    found = expected
                    if found != form:  # the net has changed, or chooses by itself
                        found = self._form_of_other_rows(args, shards, parameters)
                    _check_same(form, found, shards)
                known.add(known_form)

        with ExitStack() as stack:
            # Only in training do devices wait for each other.
            if autograd.is_training() and len(shards.contexts) < len(contexts):
                layers = synchronized_layers(self.net)
                stack.enter_context(restricted(layers, shards.contexts, True))
            whole = self.run(self.devices, shards, parameters, check)
        if autograd.is_training() and not self._settings:
            warn.of_few_rows(self.net, shards.rows)
        return whole

    def summary(self, *inputs: Any) -> None:
        """As :meth:`mxnet.gluon.Block.summary`: of the net on the first device."""
        contexts, axis = self.devices.contexts[:1], self.batch_axis
        shards = Shards.split(inputs, flatten(inputs), contexts, axis)
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
        if self._adopted.keys() - parameters.keys():
            self._adopted = {}
        for parameter in not_adopted(parameters, self._adopted):
            found = contexts_of(parameter)
            if found and found != contexts and set(found) != set(contexts):
                raise ValueError(
                    f"parameter '{parameter.name}' is initialized on "
                    f"{comma_list(found)}, expected {comma_list(contexts)}; "
                    f"{self._cure()}"
                )
            replicas.adopt(parameter, contexts[0])
            self._adopted[parameter] = data_of(parameter)
        return list(parameters)

    def _cure(self):
        if is_parallel(self.net):
            return (
                "pass ctx=net.devices.contexts where parameters are initialized or "
                "loaded, or call reset_ctx(net.devices.contexts)"
            )
        return "make_parallel(..., reset_ctx=True) moves a net"

    def _is_traced(self, leaves):
        """Return True if a call is part of a graph; raise if that cannot train."""
        if not is_traced(leaves):
            return False
        trace = current_trace()
        if trace and trace.is_hybridized and autograd.is_training():
            raise RuntimeError(
                f"{name_of(trace.block)} is hybridized, and its graph would run the "
                f"parallel net {name_of(self.net)} on one device: expected that "
                "make_parallel is called with the outer one"
            )
        return True

    def _check_whole_batch(self, leaves):
        """Raise ValueError if a loop over shards calls the net."""
        contexts = [x.context for x in leaves if isinstance(x, mx.nd.NDArray)][:1]
        former, latest = self._latest
        block = threading.get_ident(), block_number()
        self._latest = block, contexts
        if former != block or not latest or latest == contexts:
            return
        if {*latest, *contexts} <= set(self.devices.contexts):
            raise ValueError(
                f"net was called with arrays on {latest[0]} and then with arrays on "
                f"{contexts[0]} in one block of autograd.record(). A parallel net "
                "splits its batch itself: pass the whole batch in one call, without "
                "split_and_load."
            )

    def convert_layers(self) -> None:
        """Synchronize all batch normalizations of the net."""
        if self._settings:
            convert(self.net, self._settings)
            self._unconverted = self._unsynchronized()

    def _unsynchronized(self):
        return set(unsynchronized_layers(self.net))

    def _form_of_other_rows(self, args, shards, parameters):
        """Return the form of the outputs for another number of rows on one device.

        Where all devices have equally many rows, a result of that length need not have
        rows: it may be a mean of the shard. Statistics of layers, and the generators of
        random numbers, are left as they were.

        None if the net takes no other number, as GluonCV's R-CNN; what else is wrong
        with a call, the call itself raises.
        """
        first, count = self.devices.contexts[:1], 3 if shards.rows[0] == 2 else 2
        few = Shards.split(args, flatten(args), first, self.batch_axis, count)
        span = Span(self.net) if autograd.is_recording() else None

        def call(args):
            try:
                return self._call(args)
            except Exception:  # noqa: BLE001
                return None  # an error of this map would end the work under way

        with ExitStack() as stack:
            if autograd.is_training():
                stack.enter_context(replicas.unchanged(parameters))
                layers = synchronized_layers(self.net)
                stack.enter_context(restricted(layers, first))
            (found,) = self._lookers.map_first(call, few.arguments)
            self.net.apply(forget_graph)  # static graphs keep a thread's generator
        if span:
            span.end(variables_on(first[0], parameters))
        return found and common_form(*zip(found), few)


def _check_same(form, found, shards):
    if found not in (form, None):
        raise ValueError(
            f"the outputs are {form} for {pluralize(shards.rows[0], 'row')} on each "
            f"device, but {found} for another number of rows, where * stands for the "
            "rows, expected the same; what has no rows cannot be joined: a loss inside "
            "of the net returns one value a row"
        )


def is_parallel(net: Any) -> bool:
    """Return True if :func:`make_parallel` was called with a net."""
    return isinstance(vars(net).get("forward"), ParallelForward)


def check_not_parallel(net: Any, function: str) -> None:
    """Raise an error unless `net` is a Block that is not parallel yet."""
    check_block("net", net)
    if is_parallel(net):
        raise ValueError(
            f"net is parallel already, over {comma_list(net.devices.contexts)}, and "
            f"needs no {function}: expected another one, or revert_parallel(net) before"
        )
