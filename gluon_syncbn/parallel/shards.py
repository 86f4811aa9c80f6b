"""Split the arguments of a net's call over devices, and join its results again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Any, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..arguments import check_type, comma_list, pluralize
from ..mxnet_private.arrays import (
    add_n,
    array_of,
    concat,
    flatten,
    rebuild,
    to_context,
)
from ..mxnet_private.graphs import DTYPES, variables_behind

_FIX = "Return one value per row, also from a loss inside the net."


@dataclass(frozen=True)
class Shards:
    """The arguments of a net's call, split over the devices that get rows."""

    contexts: Sequence[mx.Context]
    arguments: list  # one list for each context
    # (input, its shards, axis) for each input that needs a gradient. The axis is None
    # if each shard is the whole input. Otherwise the input was split along the axis.
    recorded: list
    axis: int | None = None  # None if the arguments were not split
    rows: Sequence[int] = ()  # the number of rows on each context

    @classmethod
    def as_is(cls, args: Sequence, context: mx.Context) -> Shards:
        """Return the arguments of a call that runs on one device."""
        leaves, recorded = flatten(args), []
        for k, leaf in enumerate(leaves):
            if autograd.is_recording() and variables_behind([leaf]):
                leaves[k] = leaf.detach()
                recorded.append(_recorded(leaf, [leaves[k]], None))
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
        """Split the first `limit` rows of `leaves`, which are the flattened `args`.

        Leaves without rows go to each context. Contexts that get no row are left out.
        """
        _check_no_shards(args, contexts)
        are_split = [
            hasattr(x, "dtype") and len(getattr(x, "shape", ())) > 0 for x in leaves
        ]
        count = number_of_rows(compress(leaves, are_split), axis)
        count = count if limit is None else min(count, limit)
        contexts = contexts[:count]
        bounds = share_bounds(count, len(contexts))
        columns, recorded = [], []
        for leaf, is_split in zip(leaves, are_split):
            if is_split:
                check_array(leaf)
                column = split_rows(leaf, contexts, axis, bounds)
            elif isinstance(leaf, mx.nd.NDArray):
                column = [leaf.detach().copyto(context) for context in contexts]
            else:
                column = [leaf] * len(contexts)
            columns.append(column)
            if autograd.is_recording() and variables_behind([leaf]):
                recorded.append(_recorded(leaf, column, axis if is_split else None))
        arguments = [rebuild(list(args), iter(row)) for row in zip(*columns)]
        rows = [end - begin for begin, end in bounds]
        return cls(contexts, arguments, recorded, axis, rows)


def _recorded(leaf, shards, axis):
    """Attach gradients to an input's shards; return an item of `Shards.recorded`."""
    for shard in shards:
        shard.attach_grad()
    return leaf.as_nd_ndarray(), [shard.as_nd_ndarray() for shard in shards], axis


def share_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each share; the first shares get the remaining rows."""
    share, more = divmod(rows, count)
    bounds = [k * share + min(k, more) for k in range(count + 1)]
    return list(zip(bounds, bounds[1:]))


def split_rows(
    batch: mx.nd.NDArray | np.ndarray,
    contexts: Sequence[mx.Context],
    batch_axis: int,
    bounds: Sequence[tuple[int, int]],
) -> list[mx.nd.NDArray]:
    """Return each context's rows, from `begin` to `end`, without recording."""
    shards, index = [], [slice(None)] * batch.ndim
    is_array = isinstance(batch, mx.nd.NDArray)
    rows: Any = batch
    rows = rows.detach() if is_array else rows
    for context, (begin, end) in zip(contexts, bounds):
        index[batch_axis] = slice(begin, end)
        shard = rows[tuple(index)]
        shards.append((to_context if is_array else array_of)(shard, context))
    return shards


def join_shards(shards: Sequence, axis: int | None, context: mx.Context) -> Any:
    """Concatenate arrays, or add them if `axis` is None.

    If the shards are other objects, return the first one.
    """
    if not isinstance(shards[0], mx.nd.NDArray):
        return shards[0]
    arrays = [x if x.context == context else to_context(x, context) for x in shards]
    if len(arrays) == 1:
        return arrays[0]
    if axis is None:
        return add_n(*arrays)
    is_np = isinstance(arrays[0], mx.np.ndarray)
    return mx.np.concatenate(arrays, axis) if is_np else concat(*arrays, dim=axis)


# ---- Checks of arguments and results.


def check_array(batch: Any) -> None:
    """Raise TypeError unless MXNet can use a batch as a dense array."""
    types = mx.nd.NDArray, np.ndarray
    check_type("batch", batch, types, "an NDArray or NumPy array")
    if isinstance(batch, mx.nd.sparse.BaseSparseNDArray):
        raise TypeError(f"batch must be a dense array, got a {batch.stype} array")
    if isinstance(batch, np.ndarray) and batch.dtype.type not in DTYPES:
        raise TypeError(
            f"the dtype of batch must be {comma_list(sorted(DTYPES.values()))}, got "
            f"{batch.dtype}"
        )


def _check_no_shards(args, contexts):
    """Raise TypeError for the result of split_and_load."""
    for arg in args:
        is_list = isinstance(arg, (list, tuple)) and len(contexts) > 1
        if is_list and list(contexts) == [getattr(x, "context", None) for x in arg]:
            raise TypeError(
                "an argument of a parallel net must be the whole batch, got a list of "
                f"shards, one on each of {comma_list(contexts)}. Pass the batch "
                "without split_and_load."
            )


def number_of_rows(arrays: Iterable, axis: int) -> int:
    """Return the number of rows; raise ValueError if it is 0 or differs."""
    shapes = [tuple(array.shape) for array in arrays]
    for shape in shapes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"batch_axis must be an axis of all inputs, got {axis} for the shape "
                f"{shape}"
            )
    counts = {shape[axis] for shape in shapes}
    if not counts:
        raise ValueError(
            "the inputs must have at least one array with rows, got no array"
        )
    if len(counts) > 1:
        raise ValueError(
            f"the inputs must have equal numbers of rows along axis {axis}, got "
            f"{comma_list(sorted(counts))}"
        )
    if counts == {0}:
        raise ValueError(f"the batch must have rows along axis {axis}, got 0")
    return counts.pop()


def describe_outputs(
    outputs: Sequence, leaves: Sequence, shards: Shards, needs_rows: bool = True
) -> str:
    """Return the structure, types, dtypes and shapes that all devices' outputs have.

    A star in a shape stands for the rows. Raise ValueError if the devices' outputs
    differ, or if an array needs rows and does not have them.
    """
    axis, found = shards.axis, []
    for output, arrays, rows in zip(outputs, leaves, shards.rows):
        texts = [_describe(leaf, axis, rows) for leaf in arrays]
        for number, (leaf, text) in enumerate(zip(arrays, texts)):
            if needs_rows and isinstance(leaf, mx.nd.NDArray) and "*" not in text:
                raise ValueError(
                    f"output {number} must have {rows} rows along axis {axis} like the "
                    f"input, got shape {leaf.shape} on {leaf.context}. {_FIX}"
                )
        found.append(str(rebuild(output, iter(texts))))
    for context, description in zip(shards.contexts, found):
        if description != found[0]:
            raise ValueError(
                "the outputs must have the same structure, types, dtypes and shapes on "
                f"all devices, apart from the rows (*) along axis {axis}, got "
                f"{found[0]} on {shards.contexts[0]} and {description} on {context}"
            )
    return found[0]


def check_independent_of_rows(description: str, other: str | None, rows: int) -> None:
    """Raise ValueError if the outputs' description depends on the number of rows."""
    if other not in (description, None):
        raise ValueError(
            "the outputs must have the same shapes for any number of rows (*), got "
            f"{description} for {pluralize(rows, 'row')} on each device, {other} for "
            f"another number of rows. {_FIX}"
        )


def _describe(leaf, axis, rows):
    if not isinstance(leaf, mx.nd.NDArray):
        return type(leaf).__name__
    shape = list(map(str, leaf.shape))
    if -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == rows:
        shape[axis] = "*"
    return f"{type(leaf).__name__} {np.dtype(leaf.dtype)} ({', '.join(shape)})"
