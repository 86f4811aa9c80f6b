"""Nets and losses on shards, as GluonCV's segmentation scripts drive them.

Called by users of these scripts. GluonCV looks `parallel_apply` up at call time, but
asserts a shard for each context before it: to serve batches with fewer rows, a wrapper
would have to replace as much.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Callable, Sequence

import mxnet as mx
from mxnet import autograd

from ..mxnet_private.parameters import data_of, gradients_of
from ..parallel.destination import contribute_nothing
from ..parallel.net import move
from ..parallel.participation import participating
from ..parallel.plain_loop import allow_plain_loop
from .executor import arrays_of, nets_of


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
            for net in nets_of(module):
                allow_plain_loop(net)

    def __call__(self, *inputs, **kwargs):
        from gluoncv.utils.parallel import split_load_kwargs, tuple_map

        if not self.ctx_list:
            return self.module(*inputs, **kwargs)
        arrays = arrays_of((inputs, kwargs))
        count = max(1, min(map(len, arrays), default=len(self.ctx_list)))
        active, idle = self.ctx_list[:count], self.ctx_list[count:]
        shards = zip(*split_load_kwargs(inputs, kwargs, active))
        with ExitStack() as stack:
            # Only in training do devices wait for each other.
            if idle and autograd.is_training():
                for net in nets_of(self.module):
                    stack.enter_context(participating(net, active))
            outputs = [tuple_map(self.module(*args, **kw)) for args, kw in shards]
        if idle and autograd.is_recording():
            for parameter in self.module.collect_params().values():
                is_written = parameter.grad_req == "write"
                for data, grad in zip(data_of(parameter), gradients_of(parameter)):
                    if data.context in idle:
                        contribute_nothing(data, grad, is_written)
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
