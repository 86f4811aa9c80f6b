"""Inputs of a parallel net, checked and split over its devices, and sharded outputs.

It must not know what is done with the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import mxnet as mx
from mxnet import autograd

from ..common.arguments import counted, listed
from ..common.nested import flatten, rebuild
from ..common.shares import share_bounds
from ..devices.devices import check_array, split
from ..mxnet_private.graphs import is_recorded


class Batch:
    """The arguments of a call as shards: which contexts have which rows of which axis.

    Everything that drives devices makes one: a parallel net and its criterion split
    whole arrays along `axis`; a net in a plain loop has one context, and takes arrays
    as they are, without rows: its `axis` is None.
    """

    def __init__(
        self,
        args: Sequence,
        contexts: Sequence[mx.Context],
        axis: int | None,
        parameters: Sequence[mx.gluon.Parameter],
    ) -> None:
        leaves = flatten(list(args))
        self.contexts = contexts  # the first ones, which have rows
        self.axis, self.parameters = axis, parameters  # those of the net
        self.rows: list[int] = []  # of each shard
        # (input, its shards, which have gradients) of all that `autograd` records.
        self.differentiable: list = []
        if axis is not None:
            _check_whole(args, contexts)
            rows = _rows(leaves, axis)
            self.contexts = contexts[:rows]
            bounds = share_bounds(rows, len(self.contexts))
            self.rows = [end - begin for begin, end in bounds]
        columns = [self._split(leaf) for leaf in leaves]
        # For each device that has rows the arguments of the net's call.
        self.shards = [rebuild(list(args), iter(shard)) for shard in zip(*columns)]

    def _split(self, leaf):
        is_differentiable = autograd.is_recording() and is_recorded(leaf)
        if self.axis is None:
            shards = [leaf.detach() if is_differentiable else leaf]
        elif _is_array(leaf):
            check_array(leaf)
            shards = split(leaf, self.contexts, self.axis)
        else:
            return [leaf] * len(self.contexts)
        if is_differentiable:
            for shard in shards:
                shard.attach_grad()
            self.differentiable.append((leaf, shards))
        return shards


class ShardedOutput(Sequence):
    """Outputs of the devices that had rows, in order; each as the net returned it.

    A sequence, but no list: MXNet would take a list apart, and fail over its arrays.

    Examples
    --------
    >>> from gluon_syncbn import make_parallel
    >>> import mxnet as mx
    >>> contexts = [mx.cpu(0), mx.cpu(1)]
    >>> net = make_parallel(mx.gluon.nn.Dense(3), ctx=contexts, gather=False)
    >>> net.initialize()
    >>> [(y.shape, y.context) for y in net(mx.nd.ones((5, 2)))]
    [((3, 3), cpu(0)), ((2, 3), cpu(1))]
    """

    def __init__(self, outputs: Iterable, batch: Batch, net: Any) -> None:
        self._outputs = list(outputs)
        self.batch, self.net = batch, net

    def __len__(self):
        return len(self._outputs)

    def __getitem__(self, index):
        return self._outputs[index]

    def __repr__(self):
        return f"ShardedOutput of {counted(len(self), 'device')} ({_ADVICE})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"ShardedOutput has no attribute '{name}': {_ADVICE}")


_ADVICE = (
    "give it to a ParallelCriterion, or make the net without gather=False, which then "
    "returns whole arrays"
)


def _check_whole(args, contexts):
    """TypeError for a list of shards, as split_and_load returns it."""
    for arg in args:
        if not isinstance(arg, (list, tuple)) or len(contexts) < 2:
            continue
        if list(contexts) == [getattr(x, "context", None) for x in arg]:
            raise TypeError(
                "a parallel net takes the whole batch and splits it, but got a list of "
                f"shards, one on each of {listed(contexts)}"
            )


def _is_array(leaf):
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0


def _rows(leaves, axis):
    shapes = [tuple(leaf.shape) for leaf in leaves if _is_array(leaf)]
    for shape in shapes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"batch_axis is {axis}, but an input has shape {shape}")
    counts = {shape[axis] for shape in shapes}
    if not counts:
        raise ValueError("the inputs hold no array, expected at least one with rows")
    if len(counts) > 1:
        raise ValueError(
            f"the inputs have {listed(sorted(counts))} rows along axis "
            f"{axis}, expected equal numbers"
        )
    if counts == {0}:
        raise ValueError(f"the batch has 0 rows along axis {axis}, expected at least 1")
    return counts.pop()
