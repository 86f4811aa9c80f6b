"""A loss that is computed on each device where the outputs of a parallel net are.

It must not know what the loss computes.
"""

from __future__ import annotations

from typing import Any, Callable

from mxnet.gluon import Block

from ..common.arguments import check_callable, check_type, counted, shown
from ..common.nested import arrays_in
from . import backward
from .batch import Batch, ShardedOutput
from .net import ParallelNet


class ParallelCriterion(Block):
    """A loss that is computed where the outputs are.

    The counterpart of ``make_parallel(..., gather=False)``: only the losses are brought
    to the first context.

    Parameters
    ----------
    loss : callable
        Takes a device's output (spread out, if it is a tuple or list) and its shard of
        the labels, and returns one value per row, as Gluon's losses do; or nested ones.
    net : ParallelNet
        The net whose outputs it will get, made with ``gather=False``.

    Inputs
        - **output** : :class:`ShardedOutput` of `net`.
        - **labels** : whole arrays, split as the net's inputs were.

    Outputs
        - **loss** : one value per row of the whole batch, on the first context; in the
          nesting in which `loss` returns them.

    Examples
    --------
    >>> from gluon_syncbn import ParallelCriterion, make_parallel
    >>> import mxnet as mx
    >>> from mxnet import gluon
    >>> contexts = [mx.cpu(0), mx.cpu(1)]
    >>> net = make_parallel(gluon.nn.Dense(1), ctx=contexts, gather=False)
    >>> net.initialize(mx.init.One())
    >>> criterion = ParallelCriterion(gluon.loss.L2Loss(), net)
    >>> criterion(net(mx.nd.array([[1], [2], [3]])), mx.nd.zeros((3, 1))).asnumpy()
    array([0.5, 2. , 4.5], dtype=float32)
    """

    def __init__(self, loss: Callable, net: ParallelNet) -> None:
        super().__init__(prefix="")
        check_callable("loss", loss)
        check_type("net", net, ParallelNet, "what make_parallel returns")
        self.loss = loss
        # Not as a child: a criterion does not own the net's parameters.
        self.__dict__["net"] = net

    def forward(self, output: ShardedOutput, *labels: Any) -> Any:
        """Calls the loss on every device that has an output."""
        kind = "what a net of make_parallel(..., gather=False) returns"
        check_type("output", output, ShardedOutput, kind)
        net = self.net
        if output.net is not net:
            raise ValueError(
                "output is from another net than the criterion's, expected one of "
                f"{net.net.name}, but got one of {output.net.net.name}"
            )
        contexts, parameters = net.devices.contexts, output.batch.parameters
        batch = Batch(labels, contexts, net.batch_axis, parameters)
        rows, expected = sum(batch.rows), sum(output.batch.rows)
        if rows != expected:
            raise ValueError(
                f"labels have {counted(rows, 'row')}, but the net's input had "
                f"{expected}"
            )

        def call(output, shard):
            outputs = output if isinstance(output, (list, tuple)) else [output]
            return self.loss(*outputs, *shard)

        losses = net.devices.map_first(call, output, batch.shards)
        if not arrays_in(losses):
            raise TypeError(
                "loss returns an array with one value per row, or nested ones, but got "
                f"{shown(losses[0])}"
            )
        batch.differentiable = output.batch.differentiable + batch.differentiable
        return backward.gather(losses, batch, net.devices)
