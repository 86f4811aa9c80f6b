"""The arguments of a net's call split over devices, and its results joined again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..arguments import comma_list
from ..devices.devices import check_array, split
from ..mxnet_private.arrays import (
    add_n,
    concat,
    flatten,
    rebuild,
    share_bounds,
    to_context,
)
from ..mxnet_private.graphs import variables_behind


@dataclass(frozen=True)
class Shards:
    """The arguments of a call for each device that takes part in it.

    Attributes
    ----------
    contexts : list of mxnet.Context
        The devices.
    arguments : list
        The arguments of each device's call.
    recorded : list of (NDArray, list of NDArray, int or None)
        Each input that depends on a variable, its shards, which have gradients, and the
        axis to join these along. Shards without an axis are copies.
    axis : int or None
        The axis of the rows; None in a plain loop, where the caller has split them.
    rows : list of int
        The number of rows of each device.
    """

    contexts: Sequence[mx.Context]
    arguments: list
    recorded: list
    axis: int | None = None
    rows: Sequence[int] = ()

    @classmethod
    def as_is(cls, args: Sequence, context: mx.Context) -> Shards:
        """Return the arguments of a call for one device."""
        leaves, recorded = flatten(args), []
        for k, leaf in enumerate(leaves):
            if autograd.is_recording() and variables_behind([leaf]):
                leaves[k] = leaf.detach()
                leaves[k].attach_grad()
                recorded.append((leaf, [leaves[k]], None))
        return cls([context], [rebuild(list(args), iter(leaves))], recorded)

    @classmethod
    def split(
        cls,
        args: Sequence,
        leaves: Sequence,
        contexts: Sequence[mx.Context],
        axis: int,
        limit: int | None = None,
    ) -> Shards:
        """Split whole batches, or their first rows, over as many devices as get a row.

        `leaves` are those of `args`. Arrays without axes are copied to each device.
        """
        _check_whole(args, contexts)
        count = _rows(leaves, axis)
        count = count if limit is None else min(count, limit)
        contexts = contexts[:count]
        bounds = share_bounds(count, len(contexts))
        rows = [end - begin for begin, end in bounds]
        columns, recorded = [], []
        for leaf in leaves:
            if has_axes(leaf):
                check_array(leaf)
                column = split(leaf, contexts, axis, bounds)
            elif isinstance(leaf, mx.nd.NDArray):
                with autograd.pause():
                    column = [to_context(leaf.copy(), context) for context in contexts]
            else:
                column = [leaf] * len(contexts)
            columns.append(column)
            if autograd.is_recording() and variables_behind([leaf]):
                for shard in column:
                    shard.attach_grad()
                recorded.append((leaf, column, axis if has_axes(leaf) else None))
        arguments = [rebuild(list(args), iter(row)) for row in zip(*columns)]
        return cls(contexts, arguments, recorded, axis, rows)

    @property
    def is_even(self) -> bool:
        """Whether all of several devices have equally many rows."""
        return len(self.rows) > 1 and len(set(self.rows)) == 1


def join(shards: Sequence, axis: int | None, context: mx.Context) -> Any:
    """Return the shards of an array as a whole, or the sum of copies without an axis.

    The whole of anything else is the first device's.
    """
    if not isinstance(shards[0], mx.nd.NDArray):
        return shards[0]
    arrays = [x if x.context == context else to_context(x, context) for x in shards]
    if len(arrays) == 1:
        return arrays[0]
    is_np = isinstance(arrays[0], mx.np.ndarray)
    if axis is None:
        whole = add_n(*(array.as_nd_ndarray() for array in arrays))
        return whole.as_np_ndarray() if is_np else whole
    return mx.np.concatenate(arrays, axis) if is_np else concat(*arrays, dim=axis)


def form_of_arguments(args: Any, leaves: Sequence, axis: int) -> str:
    """Return the structure, types and dimensions of arguments, without their sizes."""
    return structure(str(rebuild(args, iter([_form(leaf, axis) for leaf in leaves]))))


def structure(form: str) -> str:
    """Return a form without its sizes, which may differ from call to call."""
    return re.sub(r"\d+", "n", form)


def common_form(outputs: Sequence, leaves: Sequence, shards: Shards) -> str:
    """Return the form of each device's outputs, in which a star stands for the rows.

    `outputs` and their `leaves` are in the order of the devices.

    Raises
    ------
    ValueError
        If a result has another length than the rows, or forms differ.
    """
    axis, forms = shards.axis, []
    for output, arrays, rows in zip(outputs, leaves, shards.rows):
        for number, leaf in enumerate(arrays):
            if not isinstance(leaf, mx.nd.NDArray):
                continue
            if not -leaf.ndim <= axis < leaf.ndim or leaf.shape[axis] != rows:
                raise ValueError(
                    f"output {number} has shape {leaf.shape} on {leaf.context}, "
                    f"expected {rows} rows along axis {axis} as the input has; what "
                    "has no rows cannot be joined: a loss inside of the net returns "
                    "one value a row"
                )
        texts = [_form(leaf, axis) for leaf in arrays]
        forms.append(str(rebuild(output, iter(texts))))
    for context, form in zip(shards.contexts, forms):
        if form != forms[0]:
            raise ValueError(
                f"the outputs on {shards.contexts[0]} are {forms[0]}, but those on "
                f"{context} are {form}, expected the same structure, types, dtypes and "
                f"shapes apart from the rows (*) along axis {axis}"
            )
    return forms[0]


def _form(leaf, axis):
    shape = list(map(str, getattr(leaf, "shape", ())))
    if not shape:
        return type(leaf).__name__
    shape[axis] = "*"
    return f"{type(leaf).__name__} {np.dtype(leaf.dtype)} ({', '.join(shape)})"


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


def has_axes(leaf: Any) -> bool:
    """Return True for an array with at least one axis."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0


def _rows(leaves, axis):
    """Return the number of rows that all arrays have."""
    shapes = [tuple(leaf.shape) for leaf in leaves if has_axes(leaf)]
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
