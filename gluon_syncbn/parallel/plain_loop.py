"""Nets that a program calls in a plain loop, for one CPU context after the other.

Each call and its backward run in a thread of the context. If one thread queued
operators of two contexts, they could wait for each other (docs/design/mxnet.md).
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import mxnet as mx
from mxnet import autograd

from ..arguments import check_block, comma_list
from ..mxnet_private.blocks import blocks_of, forget_graph
from ..mxnet_private.parameters import contexts_of
from ..mxnet_private.tape import count_scopes, scope_number
from ..native import failures
from ..nested import arrays_in
from .devices import OwnThreads, inside_map
from .forward import ForwardOnDevices, is_parallel
from .shards import Shards


def allow_plain_loop(net: mx.gluon.Block) -> mx.gluon.Block:
    """Let a net be called in a plain loop over several CPU contexts.

    Layers on CPU contexts may wait until their timeout in such a loop. This call makes
    the net run in a thread of its input's context. The loop, the loss and one
    ``backward`` need no change. A net on GPUs or on one context runs as before.
    :func:`convert_sync_batchnorm` does the same for training loops of the main thread.
    So you need this function only if another thread trains the net, or if you made its
    SyncBatchNorm layers without conversion.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net that the loop calls, not a child block. It is modified in place.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is not a Block.
    ValueError
        If `net` is already parallel.

    Notes
    -----
    Do not wait for outputs inside the loop, because they are computed only after the
    net was called for every context. Compute the net's inputs before the loop, because
    the loss of one context and the computation of the next context's input could wait
    for each other. Each context's thread has its own random generators, which
    ``mx.random.seed`` seeds.

    Examples
    --------
    >>> from gluon_syncbn import SyncBatchNorm, allow_plain_loop
    >>> import mxnet as mx
    >>> from mxnet import autograd, gluon
    >>> contexts = [mx.cpu(0), mx.cpu(1)]
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(4), SyncBatchNorm(), gluon.nn.Dense(1))
    >>> net = allow_plain_loop(net)
    >>> net.initialize(ctx=contexts)
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd")
    >>> x = mx.nd.random.normal(shape=(6, 3))
    >>> with autograd.record():
    ...     losses = [net(x) ** 2 for x in gluon.utils.split_and_load(x, contexts)]
    >>> autograd.backward(losses)
    >>> trainer.step(6)
    """
    check_block("net", net)
    if is_parallel(net):
        raise ValueError(
            "net must not be parallel yet for allow_plain_loop, got a net over "
            f"{comma_list(net.devices.contexts)}. Call the net with the whole batch, "
            "or call revert_parallel(net) first."
        )
    run_in_threads(net).is_for_all_threads = True
    return net


def run_in_threads(net: mx.gluon.Block) -> LoopForward:
    """Make calls of the main thread run in the threads of their contexts."""
    forward = vars(net).get("forward")
    if not isinstance(forward, LoopForward):
        forward = LoopForward(net)
        forward.install()
        # Static graphs keep resources of the thread that has called them first.
        net.apply(forget_graph)
    return forward


def stop_threads(net: mx.gluon.Block) -> None:
    """Undo `run_in_threads`, unless `allow_plain_loop` was called."""
    forward = vars(net).get("forward")
    if is_parallel(net):
        forward = forward.replaced.get("forward")
    if isinstance(forward, LoopForward) and not forward.is_for_all_threads:
        forward.remove()


class LoopForward(ForwardOnDevices):
    """A net's `forward` that runs a call in the thread of its input's context."""

    def __init__(self, net: mx.gluon.Block) -> None:
        super().__init__(net)
        # allow_plain_loop sets this to True, convert_sync_batchnorm does not.
        self.is_for_all_threads = False
        self._devices = {}  # {context: its Devices}
        count_scopes()
        # A round ends when all contexts have had equally many calls.
        self._round = collections.defaultdict(list)  # {context: scopes of its calls}
        self._had_round = False
        self._recovery = 0  # the number of recoveries before the latest call

    def __call__(self, *args: Any) -> Any:
        devices = self._devices_of(args)
        if devices is None:
            return self.run_replaced(*args)
        shards = Shards.as_is(args, *devices.contexts)
        return self.run(devices, shards, self._update_parameters)

    def _update_parameters(self):
        parameters = list(self.net.collect_params().values())
        self.variables.update(parameters)
        return parameters

    def _devices_of(self, args):
        """Return the Devices for a call, or None if it runs in this thread."""
        arrays = arrays_in(args)
        if not arrays or arrays[0].context.device_type == "gpu" or inside_map():
            return None
        is_main = threading.current_thread() is threading.main_thread()
        if not (self.is_for_all_threads or is_main):
            return None
        context = arrays[0].context
        if context not in self._devices:
            contexts = self._contexts_of_net()
            if len(contexts) < 2 or context not in contexts:
                return None
            self._devices[context] = OwnThreads(context)
        if autograd.is_training():
            self._check_round(context)
        return self._devices[context]

    def _contexts_of_net(self):
        parameters = (p for block in blocks_of(self.net) for p in block.params.values())
        return set(next(filter(None, map(contexts_of, parameters)), ()))

    def _check_round(self, context):
        """Recover if the program has left a round before all contexts were called.

        A call for the same context in a new scope of ``autograd.record()`` shows this.
        Repeated calls in one scope are normal.
        """
        if self._recovery != failures.latest_recovery[0]:
            self._round.clear()
        scopes, scope = self._round[context], scope_number()
        is_loop = self.is_for_all_threads or self._had_round
        if is_loop and scopes and scopes[-1] != scope:
            failures.recover(
                f"the net was called for {context} again before all other contexts had "
                "their turn"
            )
            self._round.clear()
        self._round[context].append(scope)
        if len({len(self._round[c]) for c in self._contexts_of_net()}) == 1:
            self._round.clear()
            self._had_round = True
        self._recovery = failures.latest_recovery[0]
