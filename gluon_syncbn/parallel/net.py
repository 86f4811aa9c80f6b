"""A net on several devices that is used like a net on one.

A call splits the batch, runs the net on every device through ``Devices.map``, and
gathers the outputs; ``backward.py`` carries gradients back. It must not know what the
net computes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ContextManager, Sequence

import mxnet as mx
from mxnet import autograd

from ..common.arguments import (
    check_block,
    check_bool,
    check_choice,
    check_int,
    comma_list,
    short_repr,
)
from ..common.nested import flatten
from ..devices.devices import Devices, inside_map
from ..layer.batch_norm import contexts_of
from ..layer.convert import convert_sync_batchnorm
from ..layer.synchronization import NONFINITE
from ..mxnet_private.blocks import blocks_of, current_trace, forget_graph
from ..mxnet_private.parameters import data_of, is_deferred, save_value_of
from . import backward, warn
from .participation import participating
from .shards import Shards


def make_parallel(
    net: mx.gluon.Block,
    ctx: Sequence[mx.Context],
    sync_bn: bool = True,
    batch_axis: int = 0,
    reset_ctx: bool = False,
    nonfinite: str = "propagate",
) -> mx.gluon.Block:
    """Lets a net for one device run on several.

    Afterwards it takes whole batches and returns whole outputs, equal to those of one
    device with the whole batch (Dropout aside, which draws other numbers). One loss on
    its output back-propagates through all devices. Batches may have any number of rows:
    shards differ by one row at most, and devices that get no row are skipped.

    The net is changed in place, and stays what it is: its class, its parts, its
    parameters, their names and files, hooks, copies. Its ``initialize`` and
    ``load_parameters`` take its devices where no ``ctx`` is given, and a file gets the
    first device's values. :func:`revert_parallel` undoes it.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Initialized on `ctx`, or not at all yet, unless `reset_ctx` is set. A part of it
        that is called by itself runs on one device.
    ctx : list of mxnet.Context
        Distinct contexts.
    sync_bn : bool, default True
        Whether every BatchNorm of `net` is made a SyncBatchNorm over `ctx`, in place.
        Without it the result of a net with BatchNorm depends on the number of devices.
    batch_axis : int, default 0
        The axis of the rows, in every input and output.
    reset_ctx : bool, default False
        Whether parameters that are initialized elsewhere are moved to `ctx`. GluonCV
        makes nets of which a part is initialized already.
    nonfinite : "propagate", "skip" or "raise", default "propagate"
        As in :class:`SyncBatchNorm`, for the layers that `sync_bn` converts.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself. Its attribute ``devices`` is the :class:`Devices` that run it.

    Raises
    ------
    ValueError
        If `ctx` is empty or names a context twice, or `net` is initialized on others
        and `reset_ctx` is not set; if `net` is parallel already, or has an attribute
        ``devices`` of its own.
    TypeError
        If `net` is no Block, or `ctx` holds something else than contexts.

    Notes
    -----
    The net's inputs are arrays (NDArray or NumPy, on any context) with equal numbers of
    rows, also nested in lists, tuples and dicts; every device gets anything else
    unchanged. Its outputs keep their nesting. Arrays are joined along the batch axis on
    the first device; of anything else the first device's is returned. Where outputs
    are large, make a Block parallel that holds net and loss, and returns one value a
    row.

    Inside of a function of its own ``net.devices.map``, and in the graph of a
    hybridized parent, the net runs on the one device whose array it gets.

    `backward` may be called by another thread, and writes the gradients of parameters,
    and of inputs that `attach_grad` was called for. `autograd.grad` raises a
    ValueError. Each device's thread has its own random generators:
    ``net.devices.map(lambda: mx.random.seed(0))`` seeds them.

    Examples
    --------
    >>> from gluon_syncbn import make_parallel
    >>> import mxnet as mx
    >>> from mxnet import autograd, gluon
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(4), gluon.nn.BatchNorm(), gluon.nn.Dense(1))
    >>> net = make_parallel(net, ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd")
    >>> x = mx.nd.random.normal(shape=(5, 3))
    >>> with autograd.record():
    ...     loss = (net(x) ** 2).mean()
    >>> loss.backward()
    >>> trainer.step(1)
    >>> net(x).shape
    (5, 1)
    """
    check_not_parallel(net, "make_parallel")
    check_int("batch_axis", batch_axis)
    check_bool("sync_bn", sync_bn)
    check_bool("reset_ctx", reset_ctx)
    check_choice("nonfinite", nonfinite, NONFINITE)
    devices = Devices(ctx)
    if hasattr(net, "devices"):
        raise ValueError(
            "net has an attribute 'devices' of its own, expected none: make_parallel "
            "sets it"
        )
    if reset_ctx:
        _move(net, devices.contexts)
    forward = ParallelForward(net, devices, batch_axis, sync_bn)
    forward.parameters()
    if sync_bn:
        convert_sync_batchnorm(net, num_devices=len(devices), nonfinite=nonfinite)
    net.apply(forget_graph)
    net.initialize = partial(_initialize, net, devices.contexts)
    net.load_parameters = partial(_load_parameters, net, devices.contexts)
    net.summary = forward.summary
    net.forward, net.devices = forward, devices
    return net


def revert_parallel(net: mx.gluon.Block) -> mx.gluon.Block:
    """Undoes :func:`make_parallel`: a call runs on the device whose array it gets.

    Layers stay as they are; :func:`revert_sync_batchnorm` makes them BatchNorm again.

    Parameters
    ----------
    net : mxnet.gluon.Block
        It is changed in place. Parameters stay on all devices.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is no Block.
    ValueError
        If it is not parallel.

    Examples
    --------
    >>> from gluon_syncbn import make_parallel, revert_parallel
    >>> import mxnet as mx
    >>> net = make_parallel(mx.gluon.nn.Dense(3), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> net(mx.nd.ones((5, 2))).shape
    (5, 3)
    >>> revert_parallel(net)(mx.nd.ones((5, 2), ctx=mx.cpu(1))).context
    cpu(1)
    """
    check_block("net", net)
    if not is_parallel(net):
        raise ValueError(
            f"net is one that make_parallel was called with, but got {short_repr(net)}"
        )
    for name in ("initialize", "load_parameters", "summary", "devices"):
        delattr(net, name)
    net.forward.remove()
    for parameter in net.collect_params().values():
        save_value_of(parameter, None)
    net.apply(forget_graph)
    return net


class ReplacedForward:
    """Replaces a net's `forward` on the instance, where hooks and copies keep it."""

    def __init__(self, net: mx.gluon.Block) -> None:
        self.net = net
        self._former = vars(net).get("forward")
        self.calls_class = self._former is None

    def own(self, *args: Any) -> Any:
        """What the net would do without."""
        forward = self._former or partial(type(self.net).forward, self.net)
        return forward(*args)

    def remove(self) -> None:
        """Restores the former one."""
        del self.net.forward
        if self._former:
            self.net.forward = self._former


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
        if self._synchronizes:
            warn.of_operators(self.net)
        elif autograd.is_training():
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
                        "net.collect_params().reset_ctx(net.devices.contexts) moves "
                        "it, revert_parallel(net) lets it run where it is"
                    )
                raise ValueError(
                    f"parameter '{parameter.name}' is initialized on "
                    f"{comma_list(found)}, expected {comma_list(contexts)}; {cure}"
                )
            save_value_of(parameter, contexts[0])
        return list(parameters)

    def _is_traced(self, args):
        """Tells whether a call is part of a graph; raises if that cannot train."""
        if not any(isinstance(leaf, mx.sym.Symbol) for leaf in flatten(list(args))):
            return False
        trace = current_trace()
        if trace and trace.is_hybridized and autograd.is_training():
            raise RuntimeError(
                f"{trace.block.name} is hybridized, and its graph would run the "
                f"parallel net {self.net.name} on one device: expected that "
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


def _initialize(net, contexts, init=None, ctx=None, *args, **kwargs):
    init = mx.init.Uniform() if init is None else init
    type(net).initialize(net, init, contexts if ctx is None else ctx, *args, **kwargs)


def _load_parameters(net, contexts, filename, ctx=None, *args, **kwargs):
    ctx = contexts if ctx is None else ctx
    type(net).load_parameters(net, filename, ctx, *args, **kwargs)


def _move(net: mx.gluon.Block, contexts: Sequence[mx.Context]) -> None:
    """Moves parameters that are initialized, or will be; others have no context yet."""
    for parameter in net.collect_params().values():
        if data_of(parameter) or is_deferred(parameter):
            parameter.reset_ctx(contexts)
