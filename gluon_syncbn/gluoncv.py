"""Replacements of GluonCV's helpers for several devices that work on CPUs too.

Called by users of GluonCV's training scripts. GluonCV is imported by `install` only.
"""

from __future__ import annotations

import sys
from typing import Callable, Sequence

import mxnet as mx
from mxnet.gluon import Block

from .layer.batch_norm import SyncBatchNorm
from .parallel.net import move
from .parallel.plain_loop import allow_plain_loop


def install() -> None:
    """Lets GluonCV's training scripts run on several CPU contexts, as on GPUs.

    Replaces ``DataParallelModel`` and ``DataParallelCriterion`` of
    ``gluoncv.utils.parallel`` by :class:`DataParallelModel` and
    :class:`DataParallelCriterion`, and MXNet's contrib ``SyncBatchNorm``, which the
    scripts take with ``--syncbn``, by :class:`gluon_syncbn.SyncBatchNorm`. Names that
    modules have imported already are replaced too, so a script may call this at any
    time before it makes its nets.

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
        - **outputs** : tuple with a tuple of arrays for each context.

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
        shards = zip(*split_load_kwargs(inputs, kwargs, self.ctx_list))
        return tuple(tuple_map(self.module(*args, **kw)) for args, kw in shards)

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
        - **inputs** : what the model returned.
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
        shards = zip(inputs, *split_load_kwargs(targets, kwargs, self.ctx_list))
        return tuple(self.module(*y, *args, **kw) for y, args, kw in shards)


def _nets(module):
    """The nets that a module calls: itself, or those that it holds."""
    if isinstance(module, Block):
        return [module]
    values = getattr(module, "__dict__", {}).values()
    held = [value for value in values if hasattr(value, "collect_params")]
    return [net for value in held for net in _nets(value)]
