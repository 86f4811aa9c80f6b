"""Replacements of GluonCV's helpers for several devices that work on CPUs too.

Called by users of GluonCV's training scripts. GluonCV is imported by `install` only.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block

from .common.nested import flatten
from .devices.devices import Devices
from .layer.batch_norm import SyncBatchNorm
from .parallel.net import move
from .parallel.participation import participating
from .parallel.plain_loop import allow_plain_loop


def install() -> None:
    """Lets GluonCV's training scripts run on several CPU contexts, as on GPUs.

    Replaces ``DataParallelModel``, ``DataParallelCriterion`` and ``Parallel`` of
    ``gluoncv.utils.parallel`` by :class:`DataParallelModel`,
    :class:`DataParallelCriterion` and :class:`Parallel`, and MXNet's contrib
    ``SyncBatchNorm``, which the scripts take with ``--syncbn`` or ``--norm-layer``, by
    :class:`gluon_syncbn.SyncBatchNorm`. Names that modules have imported already are
    replaced too, so a script may call this at any time before it makes its nets.

    Scripts with a loop of their own over contexts (SSD, YOLO3) need
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

        gluon_syncbn.gluoncv.install()
        model = gluoncv.utils.parallel.DataParallelModel
        assert model is gluon_syncbn.gluoncv.DataParallelModel
    """
    from gluoncv.utils import parallel

    _replace(parallel.DataParallelModel, DataParallelModel)
    _replace(parallel.DataParallelCriterion, DataParallelCriterion)
    _replace(parallel.Parallel, Parallel)
    contrib = mx.gluon.contrib.nn.SyncBatchNorm
    # Its own methods find it there by its name, and some may hold it already.
    _replace(contrib, SyncBatchNorm, but=contrib.__module__)


def _replace(former, new, but=None):
    """Replaces `former` in all modules but our own and the one named `but`."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == __package__ or name == but:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is former:
                setattr(module, key, new)


class DataParallelModel:
    """Runs a net, or an object that calls one, on shards of its inputs.

    Parameters
    ----------
    module : mxnet.gluon.Block or callable
        A net; or an object with ``collect_params``, such as GluonCV's ``SegEvalModel``.
        Its parameters are moved to the contexts.
    ctx_list : list of mxnet.Context, optional
        None calls `module` as it is.
    sync : bool, default False
        As in GluonCV. It has no effect: devices wait for each other in the layers.

    Inputs
        - **inputs** : arrays, split along their first axis as GluonCV does.

    Outputs
        - **outputs** : tuple with a tuple of arrays for each context that has rows.

    Notes
    -----
    Contexts for which a batch has no row are not called. In training the layers
    synchronize over the others then, and the gradients of the contexts without rows are
    set to zero, so that a Trainer may add them up.

    Examples
    --------
    .. code-block:: python

        import mxnet as mx
        from gluon_syncbn.gluoncv import DataParallelModel

        net = mx.gluon.nn.Dense(3)
        net.initialize()
        model = DataParallelModel(net, [mx.cpu(0), mx.cpu(1)])
        (y,), (z,) = model(mx.nd.ones((4, 2)))
        assert y.shape == z.shape == (2, 3)
    """

    def __init__(
        self,
        module: Callable,
        ctx_list: Sequence[mx.Context] | None = None,
        sync: bool = False,
    ) -> None:
        self.module, self.ctx_list, self.sync = module, ctx_list, sync
        if ctx_list:
            move(module, ctx_list)
            for net in _nets(module):
                allow_plain_loop(net)

    def __call__(self, *inputs, **kwargs):
        from gluoncv.utils.parallel import split_load_kwargs, tuple_map

        if not self.ctx_list:
            return self.module(*inputs, **kwargs)
        arrays = _arrays((inputs, kwargs))
        count = max(1, min(map(len, arrays), default=len(self.ctx_list)))
        active, idle = self.ctx_list[:count], self.ctx_list[count:]
        shards = zip(*split_load_kwargs(inputs, kwargs, active))
        with ExitStack() as stack:
            # Only in training do devices wait for each other.
            if idle and autograd.is_training():
                for net in _nets(self.module):
                    stack.enter_context(participating(net, active))
            outputs = [tuple_map(self.module(*args, **kw)) for args, kw in shards]
        if autograd.is_recording():
            _set_gradients_to_zero(self.module, idle)
        return tuple(outputs)

    def __repr__(self):
        return f"DataParallelModel({self.module!r}, {self.ctx_list})"


class DataParallelCriterion:
    """Computes a loss where the outputs of a ``DataParallelModel`` are.

    Parameters
    ----------
    module : callable
        Takes a context's outputs and targets.
    ctx_list, sync
        As in :class:`DataParallelModel`.

    Inputs
        - **inputs** : what the model returned, for the contexts that had rows.
        - **targets** : arrays, split as the model's inputs are.

    Outputs
        - **losses** : tuple with what `module` returns for each context; one
          ``autograd.backward`` takes it.

    Examples
    --------
    .. code-block:: python

        import mxnet as mx
        from gluon_syncbn.gluoncv import DataParallelCriterion, DataParallelModel

        net = mx.gluon.nn.Dense(1)
        net.initialize()
        contexts = [mx.cpu(0), mx.cpu(1)]
        model = DataParallelModel(net, contexts)
        criterion = DataParallelCriterion(mx.gluon.loss.L2Loss(), contexts)
        with mx.autograd.record():
            losses = criterion(model(mx.nd.ones((4, 2))), mx.nd.zeros((4, 1)))
        mx.autograd.backward(losses)
    """

    def __init__(
        self,
        module: Callable,
        ctx_list: Sequence[mx.Context] | None = None,
        sync: bool = False,
    ) -> None:
        self.module, self.ctx_list, self.sync = module, ctx_list, sync

    def __call__(self, inputs, *targets, **kwargs):
        from gluoncv.utils.parallel import split_load_kwargs

        if not self.ctx_list:
            return self.module(inputs, *targets, **kwargs)
        active = self.ctx_list[: len(inputs)]
        shards = zip(inputs, *split_load_kwargs(targets, kwargs, active))
        return tuple(self.module(*y, *args, **kw) for y, args, kw in shards)


class Parallel:
    """Runs forward and backward of each shard in a thread of the shard's context.

    GluonCV's scripts for Faster and Mask R-CNN drive their devices with it. GluonCV's
    own class runs shards of several CPU contexts in one thread, where MXNet makes them
    wait for each other, see :class:`gluon_syncbn.Devices`.

    Parameters
    ----------
    num_workers : int
        As in GluonCV. It has no effect: each context has one thread.
    parallizable : object
        Its ``forward_backward`` takes a shard: arrays of one context, also nested.
    serial_init : bool, default True
        As in GluonCV. It has no effect: contexts are called one after the other.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_syncbn.gluoncv import Parallel
    >>> class Task:
    ...     def forward_backward(self, shard):
    ...         return shard.sum()
    >>> executor = Parallel(2, Task())
    >>> for context in [mx.cpu(0), mx.cpu(1)]:
    ...     executor.put(mx.nd.ones((3,), ctx=context))
    >>> [executor.get().asscalar() for _ in range(2)]
    [3.0, 3.0]
    """

    def __init__(
        self, num_workers: int, parallizable: Any, serial_init: bool = True
    ) -> None:
        self._parallizable = parallizable
        self._shards: list = []
        self._results: list = []
        self._devices: Devices | None = None

    def put(self, x: Any) -> None:
        """Takes a shard, to be run with those of the other contexts.

        Parameters
        ----------
        x : nested list of NDArray
            All on the context that is to run them.

        Raises
        ------
        ValueError
            If there is no array in it.
        """
        arrays = _arrays(x)
        if not arrays:
            raise ValueError(f"x is {x!r}, expected a shard with at least one NDArray")
        self._shards.append((arrays[0].context, x))

    def get(self) -> Any:
        """The result of the oldest shard whose result was not taken yet.

        Shards run when the first of their results is asked for, one of each context, so
        that no context waits for one that has no work.

        Returns
        -------
        object
            What ``forward_backward`` has returned.

        Raises
        ------
        IndexError
            If there are as many calls of `get` as of `put`.
        """
        if not self._results:
            self._run()
        return self._results.pop(0)

    def _run(self):
        """Runs the oldest shard of each context."""
        if not self._shards:
            raise IndexError("get was called more often than put")
        shards: dict = {}
        while self._shards and self._shards[0][0] not in shards:
            context, shard = self._shards.pop(0)
            shards[context] = shard
        contexts = list(shards)
        if self._devices is None or self._devices.contexts != contexts:
            self._devices = Devices(contexts)
            for net in _nets(self._parallizable):
                # Mask R-CNN makes it in its first call, for one context only.
                if hasattr(net, "target_generator"):
                    net.target_generator.collect_params().reset_ctx(contexts)
        forward_backward = self._parallizable.forward_backward
        self._results = self._devices.map(forward_backward, list(shards.values()))


def _arrays(value):
    return [leaf for leaf in flatten(value) if isinstance(leaf, mx.nd.NDArray)]


def _nets(module):
    """The nets that a module calls: itself, or those that it holds."""
    if isinstance(module, Block):
        return [module]
    values = getattr(module, "__dict__", {}).values()
    held = [value for value in values if hasattr(value, "collect_params")]
    return [net for value in held for net in _nets(value)]


def _set_gradients_to_zero(module, contexts):
    """Clears gradients that no backward will write; those that are added up stay."""
    for parameter in module.collect_params().values():
        for data, grad in zip(parameter._data or (), parameter._grad or ()):
            if data.context in contexts:
                if parameter.grad_req == "write":
                    with autograd.pause():
                        grad[:] = 0
                data._fresh_grad = True
