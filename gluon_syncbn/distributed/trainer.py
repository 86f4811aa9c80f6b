"""A Gluon Trainer that adds gradients up over all processes, on the CPU over MPI.

Called by users. With Horovod installed, ``hvd.DistributedTrainer`` does the same on
GPUs too. It must not know the net's layers.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from ..common.arguments import check_bool, check_real, check_type, shown
from ..mxnet_private.parameters import gradient_storage
from ..mxnet_private.trainers import update_counts
from ..native.world import world
from .collectives import allreduce, broadcast, exchange
from .parameters import broadcast_parameters, parameters_of
from .processes import join


class Trainer(mx.gluon.Trainer):
    """A :class:`mxnet.gluon.Trainer` over all contexts of all processes.

    If the loss is the sum over samples, a step equals that of one device with all
    processes' samples: gradients and numbers of samples are added up over the
    processes, in a fixed order, so parameters stay the same bits on every rank.
    Gradients travel in buckets, the last layers' first, while the first layers'
    backward still runs.

    Parameters
    ----------
    net : mxnet.gluon.Block, ParameterDict or list of Parameter
        Rank 0's parameters are copied to all processes, see
        :func:`broadcast_parameters`; give the Block, which is checked best.
    optimizer, optimizer_params
        As in :class:`mxnet.gluon.Trainer`.
    bucket_megabytes : float, default 4
        Gradients that are sent at once, in units of 2**20 bytes.

    Raises
    ------
    ValueError
        If the nets differ between ranks, `net` has no parameters, or
        `bucket_megabytes` is not positive.
    TypeError
        If a gradient is sparse, or an argument has another type.

    Examples
    --------
    Each rank has a share of the batch:

    .. code-block:: python

        from gluon_syncbn import SyncBatchNorm, distributed
        import mxnet as mx

        distributed.init()
        layer = SyncBatchNorm()
        layer.initialize()
        trainer = distributed.Trainer(layer, "sgd")
        shard = mx.nd.random.normal(shape=(3 + distributed.rank(), 2))
        with mx.autograd.record():
            loss = layer(shard) ** 2
        loss.backward()
        trainer.step(len(shard))
        trainer.join()
    """

    def __init__(
        self,
        net: Any,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict | None = None,
        bucket_megabytes: float = 4,
    ) -> None:
        megabytes = check_real(
            "bucket_megabytes", bucket_megabytes, "positive", lambda value: value > 0
        )
        names = str, mx.optimizer.Optimizer
        check_type("optimizer", optimizer, names, "a name or mxnet.optimizer.Optimizer")
        dicts = dict, type(None)
        check_type("optimizer_params", optimizer_params, dicts, "a dict or None")
        parameters = parameters_of(net)
        if not parameters:
            raise ValueError(
                f"net has no parameters, expected at least one, but got {shown(net)}"
            )
        for parameter in parameters:
            storage = gradient_storage(parameter)
            if storage != "default":
                raise TypeError(
                    f"the gradient of {parameter.name} is {storage}, expected a dense "
                    "one"
                )
        # In the order of names, as in mxnet.gluon.Trainer: states are saved by it.
        ordered = sorted(parameters, key=lambda parameter: parameter.name)
        super().__init__(ordered, optimizer, optimizer_params, update_on_kvstore=False)
        self._in_order_of_forward = parameters
        self._bucket_bytes = megabytes * 2**20
        broadcast_parameters(net if isinstance(net, Block) else parameters)

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Adds gradients up over contexts and processes, and updates the parameters.

        Parameters
        ----------
        batch_size : int or float
            Samples of *this* process, over its contexts. The sum of gradients is
            divided by the sum of all processes' samples, so shards may be uneven.
        ignore_stale_grad : bool, default False
            As in :class:`mxnet.gluon.Trainer`.

        Raises
        ------
        TypeError
            If `batch_size` is no number, or `ignore_stale_grad` no bool.
        ValueError
            If `batch_size` is negative or not finite, or 0 in all processes.
        """
        samples = check_real(
            "batch_size",
            batch_size,
            "a finite number of samples, not negative",
            lambda value: 0 <= value < math.inf,
        )
        check_bool("ignore_stale_grad", ignore_stale_grad)
        self.allreduce_grads()
        total = self._total(samples)
        if total == 0:
            raise ValueError(
                "batch_size is positive in at least one process, but got 0 in all"
            )
        self.update(total, ignore_stale_grad)

    def _total(self, samples):
        """The sum of all processes' samples; an error if one is a step ahead."""
        if world().size == 1:
            return samples
        # A failure may reach a process after its step was whole, and another's before.
        signature = f"{self._optimizer.num_update} updates before this step"
        name, array = "Trainer.step, samples", np.array([samples])
        return float(exchange(name, "sum_float64", array, signature).view(float)[0])

    def join(self, timeout: float | None = None) -> None:
        """Ends an epoch: waits for processes that have batches left, and catches up.

        Every process calls it where its batches end. It contributes nothing to the
        others' steps, and gets parameters, running statistics and optimizer states of
        the process that made the most steps, so that all are equal again.

        Parameters
        ----------
        timeout : float or None, default None
            As in :func:`join`.
        """
        last = join(timeout)
        if world().size == 1:
            return
        broadcast_parameters(self._params, last)
        optimizer = self._optimizer
        state: Any = None
        if world().rank == last:
            numbers = update_counts(optimizer), optimizer.num_update
            state = self._updaters[0].get_states(), *numbers
        state = broadcast(state, last, "Trainer.join, optimizer states")
        if world().rank != last:
            states, counts, optimizer.num_update = state
            for updater in self._updaters:
                updater.set_states(states)
            update_counts(optimizer).update(counts)

    def _allreduce_grads(self):
        super()._allreduce_grads()  # over the contexts of this process
        if world().size == 1:
            return
        with ThreadPoolExecutor(1) as sender:
            sent = []
            for number, bucket in enumerate(self._buckets()):
                packed = _packed(bucket)
                name = f"Trainer.step, bucket {number} from {bucket[0].name}"
                sent.append((bucket, sender.submit(allreduce, packed, name)))
            for bucket, total in sent:
                _unpack(bucket, total.result())

    def _buckets(self):
        """Parameters with a gradient in the order of backward, by dtype and size."""
        bucket, size = [], 0
        for parameter in reversed(self._in_order_of_forward):
            if parameter.grad_req == "null":
                continue
            grad = parameter.list_grad()[0]
            nbytes = grad.size * np.dtype(grad.dtype).itemsize
            other = bucket and bucket[0].list_grad()[0].dtype != grad.dtype
            if bucket and (other or size + nbytes > self._bucket_bytes):
                yield bucket
                bucket, size = [], 0
            bucket, size = [*bucket, parameter], size + nbytes
        if bucket:
            yield bucket


def _packed(bucket):
    return np.concatenate([p.list_grad()[0].asnumpy().ravel() for p in bucket])


def _unpack(bucket, total):
    begin = 0
    for parameter in bucket:
        for grad in parameter.list_grad():
            values = total[begin : begin + grad.size].reshape(grad.shape)
            grad[:] = mx.nd.array(values, dtype=grad.dtype)
        begin += parameter.list_grad()[0].size
