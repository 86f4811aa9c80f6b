"""The arguments of a net's call, checked and split over devices.

It must not know what is done with the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd

from ..common.arguments import comma_list
from ..common.nested import flatten, rebuild
from ..common.shares import share_bounds
from ..devices.devices import check_array, split
from ..mxnet_private.graphs import is_recorded


@dataclass(frozen=True)
class Shards:
    """The arguments of a call for each device that takes part in it.

    Attributes
    ----------
    contexts : list of mxnet.Context
        The devices.
    arguments : list
        For each device those of its call.
    recorded : list of (NDArray, list of NDArray)
        Each input that `autograd` records, and its shards, which have gradients.
    axis : int or None
        The axis of the rows; None in a plain loop, where a net gets what its caller
        has split.
    rows : list of int
        For each device the number of rows.
    """

    contexts: Sequence[mx.Context]
    arguments: list
    recorded: list
    axis: int | None = None
    rows: Sequence[int] = ()

    @classmethod
    def as_is(cls, args: Sequence, context: mx.Context) -> Shards:
        """The arguments of a call for one device."""

        def is_cut(leaf):
            return autograd.is_recording() and is_recorded(leaf)

        return cls._of(args, [context], is_cut, lambda leaf: [leaf.detach()])

    @classmethod
    def split(cls, args: Sequence, contexts: Sequence[mx.Context], axis: int) -> Shards:
        """Whole batches, split over the first contexts: as many as there are rows."""
        _check_whole(args, contexts)
        count = _rows(flatten(list(args)), axis)
        contexts = contexts[:count]
        rows = [end - begin for begin, end in share_bounds(count, len(contexts))]

        def split_leaf(leaf):
            check_array(leaf)
            return split(leaf, contexts, axis)

        return cls._of(args, contexts, _is_array, split_leaf, axis, rows)

    @classmethod
    def _of(cls, args, contexts, is_split, split_leaf, *rows):  # noqa: ANN206
        columns, recorded = [], []
        for leaf in flatten(list(args)):
            if not is_split(leaf):
                columns.append([leaf] * len(contexts))
                continue
            columns.append(split_leaf(leaf))
            if autograd.is_recording() and is_recorded(leaf):
                for shard in columns[-1]:
                    shard.attach_grad()
                recorded.append((leaf, columns[-1]))
        arguments = [rebuild(list(args), iter(shards)) for shards in zip(*columns)]
        return cls(contexts, arguments, recorded, *rows)


def _check_whole(args, contexts):
    """TypeError for a list of shards, as split_and_load returns it."""
    for arg in args:
        if not isinstance(arg, (list, tuple)) or len(contexts) < 2:
            continue
        if list(contexts) == [getattr(x, "context", None) for x in arg]:
            raise TypeError(
                "a parallel net takes the whole batch and splits it, but got a list of "
                f"shards, one on each of {comma_list(contexts)}"
            )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0


def _rows(leaves, axis):
    """The number of rows that all arrays have."""
    shapes = [tuple(leaf.shape) for leaf in leaves if _is_array(leaf)]
    for shape in shapes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"batch_axis is {axis}, but an input has shape {shape}")
    counts = {shape[axis] for shape in shapes}
    if not counts:
        raise ValueError("the inputs hold no array, expected at least one with rows")
    if len(counts) > 1:
        raise ValueError(
            f"the inputs have {comma_list(sorted(counts))} rows along axis "
            f"{axis}, expected equal numbers"
        )
    if counts == {0}:
        raise ValueError(f"the batch has 0 rows along axis {axis}, expected at least 1")
    return counts.pop()
