"""Inputs of a parallel net, checked and split over its devices, and sharded outputs.

Called by the other modules of this wing. It must not know what is done with the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import mxnet as mx
from mxnet import autograd

from ..common.arguments import counted
from ..common.nested import flatten, rebuild
from ..common.shares import share_bounds
from ..devices.devices import check_array, split
from .graph import is_recorded


class Batch:
    """A whole batch as shards.

    Attributes
    ----------
    rows : int
    active : int
        Number of devices that have rows: the first ones.
    shards : list
        Per device that has rows the arguments of the net's call.
    differentiable : list of (NDArray, list of NDArray)
        The inputs that `autograd` records, each with its shards, which have gradients.
    parameters : list of Parameter
        Those of the net.
    """

    def __init__(
        self,
        args: Any,
        contexts: Sequence[mx.Context],
        axis: int,
        parameters: Sequence[mx.gluon.Parameter],
    ) -> None:
        self.parameters = parameters
        _check_whole(args, contexts)
        leaves = flatten(list(args))
        self.rows = _rows(leaves, axis)
        self.active = min(self.rows, len(contexts))
        self.differentiable = []
        active = contexts[: self.active]
        parts = [self._split(leaf, active, axis) for leaf in leaves]
        self.shards = [rebuild(list(args), iter(shard)) for shard in zip(*parts)]

    def shard_rows(self) -> list[int]:
        """Rows of each shard."""
        return [end - begin for begin, end in share_bounds(self.rows, self.active)]

    def _split(self, leaf, contexts, axis):
        if not _is_array(leaf):
            return [leaf] * len(contexts)
        check_array(leaf)
        shards = split(leaf, contexts, axis)
        if autograd.is_recording() and is_recorded(leaf):
            for shard in shards:
                shard.attach_grad()
            self.differentiable.append((leaf, shards))
        return shards


class ShardedOutput(Sequence):
    """Outputs of the devices that had rows, in order; each as the net returned it.

    A sequence, but no list: MXNet would take a list apart, and fail over its arrays.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_syncbn import make_parallel
    >>> contexts = [mx.cpu(0), mx.cpu(1)]
    >>> net = make_parallel(mx.gluon.nn.Dense(3), ctx=contexts, gather=False)
    >>> net.initialize()
    >>> [(y.shape, y.context) for y in net(mx.nd.ones((5, 2)))]
    [((3, 3), cpu(0)), ((2, 3), cpu(1))]
    """

    def __init__(self, outputs: Iterable, batch: Any, net: Any) -> None:
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
                f"shards, one on each of {', '.join(map(str, contexts))}"
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
            f"the inputs have {', '.join(map(str, sorted(counts)))} rows along axis "
            f"{axis}, expected equal numbers"
        )
    if counts == {0}:
        raise ValueError(f"the batch has 0 rows along axis {axis}, expected at least 1")
    return counts.pop()
