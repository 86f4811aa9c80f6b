"""A Gluon Trainer that adds gradients up over all processes, on the CPU over MPI.

With Horovod installed, ``hvd.DistributedTrainer`` does the same on GPUs too. It must
not know the net's layers.
"""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
from mxnet.gluon import Block

from ..common.arguments import check_bool, check_real, check_type, short_repr
from ..mxnet_private.parameters import gradient_storage, gradients_of
from ..mxnet_private.trainers import update_counts
from ..native.world import world
from .gradients import sum_in_place
from .meeting import broadcast, total
from .parameters import broadcast_parameters, parameters_of
from .processes import join


class Trainer(mx.gluon.Trainer):
    """A :class:`mxnet.gluon.Trainer` over all contexts of all processes.

    If the loss is the sum over samples, a step equals that of one device with all
    processes' samples: gradients and numbers of samples are added up over the
    processes, and MPI gives all ranks the same bits. On CPUs it adds up in the
    gradients' own memory, the last layers' first, while the first layers' backward
    still runs.

    Parameters
    ----------
    net : mxnet.gluon.Block, ParameterDict or list of Parameter
        Rank 0's parameters are copied to all processes, see
        :func:`broadcast_parameters`; give the Block, which is checked best.
    optimizer, optimizer_params
        As in :class:`mxnet.gluon.Trainer`.

    Raises
    ------
    ValueError
        If the nets differ between ranks, or `net` has no parameters.
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
    ) -> None:
        names = str, mx.optimizer.Optimizer
        check_type("optimizer", optimizer, names, "a name or mxnet.optimizer.Optimizer")
        dicts = dict, type(None)
        check_type("optimizer_params", optimizer_params, dicts, "a dict or None")
        parameters = parameters_of(net)
        if not parameters:
            raise ValueError(
                "net has no parameters, expected at least one, but got "
                f"{short_repr(net)}"
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
        self._samples, self._total = 0.0, 0.0  # of this rank's step, and of all ranks'
        self._comms: dict = {}  # by the ranks that are in them
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
        self._samples = samples
        self.allreduce_grads()
        if self._total == 0:
            raise ValueError(
                "batch_size is positive in at least one process, but got 0 in all"
            )
        self.update(self._total, ignore_stale_grad)

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
            self._total = self._samples
            return
        # Here ranks that are missing, or a step apart, are named.
        signature = f"{self._optimizer.num_update} updates before this step"
        own = [0.0] * (1 + world().size)
        own[0], own[1 + world().rank] = self._samples, 1.0
        self._total, *active = total("Trainer.step", own, signature)
        # Backward of the last layers ends first.
        gradients = [
            gradients_of(parameter)
            for parameter in reversed(self._in_order_of_forward)
            if parameter.grad_req != "null"
        ]
        sum_in_place([own[0] for own in gradients], self._comm_of(active))
        for first, *others in gradients:
            for other in others:
                first.copyto(other)

    def _comm_of(self, active):
        """The communicator of the ranks that take this step; others have joined."""
        if all(active):
            return world().comm
        ranks = tuple(rank for rank, one in enumerate(active) if one)
        if ranks not in self._comms:
            group = world().comm.Get_group().Incl(ranks)
            self._comms[ranks] = world().comm.Create_group(group)
        return self._comms[ranks]
