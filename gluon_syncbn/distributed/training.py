"""Train in several processes: a trainer that sums gradients over MPI."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np

from ..arguments import check_bool, check_real, check_type, short_repr
from ..mxnet_private.arrays import memory_of
from ..mxnet_private.parameters import (
    copy_to_others,
    data_of,
    gradient_storage,
    gradients_of,
    is_fresh,
    mark_fresh,
)
from ..native.processes import allgather, world
from .collectives import (
    broadcast_parameters,
    check_digests,
    check_parameters,
    collectives,
    digest_of,
    layers_by_place,
)

_SIMPLE = bool, int, float, str, type(None)  # types of compared settings
_GRADIENT = "the gradient with name, dtype, shape, lr_mult and wd_mult"
_IN_PLACE = np.dtype("float32"), np.dtype("float64")
_trainer_numbers = itertools.count(1)


class Trainer(mx.gluon.Trainer):
    """A :class:`mxnet.gluon.Trainer` over all contexts of all processes.

    Gradients and numbers of samples are summed over all processes. So if the loss is a
    sum over samples, a step equals the step of one device with all processes' samples.
    All ranks get the same bits. MPI sums gradients on CPUs and begins with the last
    layer, while the backward of the first layers still runs. Gradients on GPUs are
    copied for this. Horovod's ``hvd.DistributedTrainer`` can sum them on the GPUs.

    Parameters
    ----------
    net : mxnet.gluon.Block, ParameterDict or list of Parameter
        Rank 0's parameters are copied to all ranks by :func:`broadcast_parameters`,
        which first compares the nets of all ranks.
    optimizer : str or mxnet.optimizer.Optimizer
        The optimizer or its name.
    optimizer_params : dict or None, default None
        Arguments of the optimizer.

    Raises
    ------
    ValueError
        If the nets differ between ranks, or `net` has no parameters.
    TypeError
        If a gradient is sparse, or an argument has a wrong type.

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
        parameters = check_parameters(net)
        if not parameters:
            raise ValueError(
                f"net must have at least one parameter, got {short_repr(net)}"
            )
        for parameter in parameters:
            storage = gradient_storage(parameter)
            if storage != "default":
                raise TypeError(
                    f"the gradient of {parameter.name} must be dense, got {storage}"
                )
        # mxnet.gluon.Trainer also sorts, and saves optimizer states in this order.
        ordered = sorted(parameters, key=lambda parameter: parameter.name)
        super().__init__(ordered, optimizer, optimizer_params, update_on_kvstore=False)
        self._in_order_of_forward = parameters
        self._layers = [layer._sync for layer in layers_by_place(net).values()]
        self._fresh: list = []  # parameters that have a new gradient on any rank
        self._number = next(_trainer_numbers)
        self._samples = 0.0  # the batch size of this rank
        broadcast_parameters(net)

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum gradients over contexts and processes, and update the parameters.

        Parameters
        ----------
        batch_size : int or float
            Number of samples of *this* process, summed over its contexts. Gradients are
            divided by the number of samples of all processes, so shards may be uneven.
        ignore_stale_grad : bool, default False
            If True, a parameter without a new gradient is not updated. If only some
            devices or processes have a new gradient, the other gradients count as zero,
            and all devices update.

        Raises
        ------
        ValueError
            If `batch_size` is negative, infinite or NaN, or 0 in all processes; or if
            ranks differ in the trainer, the optimizer and its settings, the layers'
            settings, the frozen parameters or the dtypes of gradients. The text names
            the first difference, and two ranks that differ.
        """
        check_bool("ignore_stale_grad", ignore_stale_grad)
        self._samples = check_real(
            "batch_size",
            batch_size,
            "a finite number of samples, not negative",
            lambda value: 0 <= value < math.inf,
        )
        self.allreduce_grads()
        if self._total == 0:
            raise ValueError(
                "batch_size must be positive in at least one process, got 0 in all"
            )
        self.update(self._total, ignore_stale_grad)

    def _allreduce_grads(self):
        has_new = [_zero_stale(p) for p in self._in_order_of_forward]
        super()._allreduce_grads()  # sums over this process's contexts only
        description = self._description()
        own = self._samples, digest_of(description), has_new
        samples, digests, are_new = zip(*allgather(own, "Trainer.step"))
        self._total = sum(samples)  # the sum of the batch sizes of all ranks
        if len({*digests}) > 1:
            fix = "Step the same trainer with the same settings on all ranks."
            lines = [f"{what} {value}" for what, value in description]
            check_digests("steps", digests, lines, fix)
        pairs = zip(self._in_order_of_forward, zip(*are_new))
        self._fresh = [parameter for parameter, ranks in pairs if any(ranks)]
        if world().size == 1:
            return
        # The backward of the last layers ends first.
        gradients = [gradients_of(parameter) for parameter in reversed(self._fresh)]
        _sum_in_place([replicas[0] for replicas in gradients])
        for replicas in gradients:
            copy_to_others(replicas)

    def _update(self, ignore_stale_grad):
        if ignore_stale_grad:
            for parameter in self._fresh:
                mark_fresh(data_of(parameter))
        self._fresh = []
        super()._update(ignore_stale_grad)

    def _description(self):
        """Return pairs (what, value) that must be equal on all ranks in a step."""
        optimizer = self._optimizer
        pairs = [
            ("the trainer with number", self._number),
            ("the optimizer", type(optimizer).__name__),
            ("the learning rate", self.learning_rate),
            ("the scale of gradients", self._scale),
        ]
        for name, value in sorted(vars(optimizer).items()):
            if isinstance(value, _SIMPLE) and not name.startswith("_"):
                pairs.append((name, value))
        for p in self._in_order_of_forward:
            if p.grad_req != "null":
                facts = p.name, _name_of_dtype(p.dtype), p.shape, p.lr_mult, p.wd_mult
                pairs.append((_GRADIENT, facts))
        return pairs + [(x.name, x.shared_settings()) for x in self._layers]


@lru_cache(maxsize=None)
def _name_of_dtype(dtype):
    return np.dtype(dtype).name


def _zero_stale(parameter):
    """Zero gradients that backward has not written; return True if it wrote any."""
    found, pairs = False, list(zip(data_of(parameter), gradients_of(parameter)))
    if getattr(parameter, "is_summed", False):
        pairs = pairs[:1]  # the first gradient is the sum of all
    for data, gradient in pairs:
        if is_fresh(data):
            found = True
        else:
            gradient[:] = 0
    return found


def _sum_in_place(arrays):
    """Sum each gradient over all ranks as soon as it is ready."""
    from mpi4py import MPI

    copies = []  # MPI cannot sum in the memory of their gradients
    with collectives("Trainer.step", memory=arrays) as requests:
        for array in arrays:
            if array.context.device_type != "gpu" and array.dtype in _IN_PLACE:
                values = memory_of(array)
            else:
                values = array.asnumpy()
                if values.dtype == np.float16:
                    values = values.astype("float32")
                copies.append((array, values))
            requests.append(world().comm.Iallreduce(MPI.IN_PLACE, values))
    for array, values in copies:
        array[:] = values
