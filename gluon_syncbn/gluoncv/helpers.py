"""Changes GluonCV's helpers for several devices, so that they work on CPUs too.

Called by users, at the beginning of a script. GluonCV looks `parallel_apply` up at call
time, but asserts a shard for each context before: for batches with fewer rows the
methods are replaced, by those of the class below that is named after what they are for.
It must not know what a net computes.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import mxnet as mx
from mxnet import autograd

from ..common.nested import arrays_in
from ..devices.devices import Devices
from ..layer.batch_norm import SyncBatchNorm
from ..mxnet_private.parameters import data_of, gradients_of
from ..parallel.destination import contribute_nothing
from ..parallel.net import move
from ..parallel.participation import participating
from ..parallel.plain_loop import allow_plain_loop


def install() -> None:
    """Lets GluonCV's training scripts run on several CPU contexts, as on GPUs.

    Changes ``DataParallelModel``, ``DataParallelCriterion`` and ``Parallel`` of
    ``gluoncv.utils.parallel``, and replaces MXNet's contrib ``SyncBatchNorm``, which
    the scripts take with ``--syncbn`` or ``--norm-layer``, by
    :class:`gluon_syncbn.SyncBatchNorm`, also where modules have imported it already.
    So a script may call this at any time before it makes its nets. Afterwards

    * ``DataParallelModel`` and ``DataParallelCriterion`` take batches with fewer rows
      than contexts. They return one element for each context that has rows; in training
      the layers synchronize over these, and the gradients of the others are set to
      zero, so that a Trainer may add them up.
    * ``Parallel`` runs forward and backward of each shard in a thread of the shard's
      context, when the first result is asked for; ``num_workers`` has no effect. A
      shard without an array is a ValueError, and a `get` without a `put` an IndexError.

    Scripts that loop over contexts themselves (SSD, YOLO3) need
    :func:`gluon_syncbn.allow_plain_loop` for their net.

    Raises
    ------
    ImportError
        If GluonCV is not installed.

    Examples
    --------
    At the beginning of a training script:

    .. code-block:: python

        import gluon_syncbn
        import gluoncv.utils.parallel
        import mxnet as mx

        gluon_syncbn.gluoncv.install()
        net = mx.gluon.nn.Dense(1)
        net.initialize()
        contexts = [mx.cpu(0), mx.cpu(1)]
        model = gluoncv.utils.parallel.DataParallelModel(net, contexts)
        (y,), (z,) = model(mx.nd.ones((4, 2)))
        assert y.shape == z.shape == (2, 1)
    """
    from gluoncv.utils import parallel

    changes = {
        parallel.DataParallelModel: _Model,
        parallel.DataParallelCriterion: _Criterion,
        parallel.Parallel: _Executor,
    }
    for kind, ours in changes.items():
        for name, method in vars(ours).items():
            if callable(method):
                setattr(kind, name, method)
    contrib = mx.gluon.contrib.nn.SyncBatchNorm
    for name, module in list(sys.modules.items()):
        # The class's own methods find it in its module by its name.
        if name.split(".")[0] == __name__.split(".")[0] or name == contrib.__module__:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is contrib:
                setattr(module, key, SyncBatchNorm)


class _Model:
    """DataParallelModel: calls a net, or an object with nets, on shards of its inputs.

    `sync` has no effect: devices wait for each other in the layers.
    """

    def __init__(self, module, ctx_list=None, sync=False):
        self.module, self.ctx_list, self.sync = module, ctx_list, sync
        if ctx_list:
            move(module, ctx_list)
            for net in _nets(module):
                allow_plain_loop(net)

    def __call__(self, *inputs, **kwargs):
        from gluoncv.utils.parallel import split_load_kwargs, tuple_map

        if not self.ctx_list:
            return self.module(*inputs, **kwargs)
        arrays = arrays_in((inputs, kwargs))
        count = max(1, min(map(len, arrays), default=len(self.ctx_list)))
        active, idle = self.ctx_list[:count], self.ctx_list[count:]
        shards = zip(*split_load_kwargs(inputs, kwargs, active))
        with ExitStack() as stack:
            # Only in training do devices wait for each other.
            if idle and autograd.is_training():
                for net in _nets(self.module):
                    stack.enter_context(participating(net, active))
            outputs = [tuple_map(self.module(*args, **kw)) for args, kw in shards]
        if idle and autograd.is_recording():
            for parameter in self.module.collect_params().values():
                is_written = parameter.grad_req == "write"
                for data, grad in zip(data_of(parameter), gradients_of(parameter)):
                    if data.context in idle:
                        contribute_nothing(data, grad, is_written)
        return tuple(outputs)


class _Criterion:
    """DataParallelCriterion: computes a loss where the outputs of a model are."""

    def __call__(self, inputs, *targets, **kwargs):
        from gluoncv.utils.parallel import split_load_kwargs

        if not self.ctx_list:
            return self.module(inputs, *targets, **kwargs)
        active = self.ctx_list[: len(inputs)]
        shards = zip(inputs, *split_load_kwargs(targets, kwargs, active))
        return tuple(self.module(*y, *args, **kw) for y, args, kw in shards)


class _Executor:
    """Parallel: GluonCV's runs shards of several CPU contexts in one thread.

    There MXNet makes them wait for each other, see :class:`gluon_syncbn.Devices`.
    """

    def __init__(self, num_workers, parallizable, serial_init=True):
        self._parallizable, self._devices = parallizable, None
        self._shards, self._results = [], []
        self._threads = []  # GluonCV's, which end with the executor

    def put(self, x):
        arrays = arrays_in(x)
        if not arrays:
            raise ValueError(f"x is {x!r}, expected a shard with at least one NDArray")
        self._shards.append((arrays[0].context, x))

    def get(self):
        if not self._results:
            if not self._shards:
                raise IndexError("get was called more often than put")
            # The oldest shard of each context, so that none waits for one without work.
            shards = {}
            while self._shards and self._shards[0][0] not in shards:
                context, shard = self._shards.pop(0)
                shards[context] = shard
            self._results = _run(self, shards)
        return self._results.pop(0)


def _run(executor, shards):
    """Forward and backward of one shard of each context."""
    contexts, task = list(shards), executor._parallizable
    if executor._devices is None or executor._devices.contexts != contexts:
        executor._devices = Devices(contexts)
        for net in _nets(task):
            # Mask R-CNN makes it in its first call, for one context only.
            if hasattr(net, "target_generator"):
                net.target_generator.collect_params().reset_ctx(contexts)
    return executor._devices.map(task.forward_backward, list(shards.values()))


def _nets(module):
    """The nets that a module calls: itself, or those that it holds."""
    if isinstance(module, mx.gluon.Block):
        return [module]
    values = getattr(module, "__dict__", {}).values()
    held = [value for value in values if hasattr(value, "collect_params")]
    return [net for value in held for net in _nets(value)]
