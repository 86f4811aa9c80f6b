"""Split the arguments of a net's call over devices, and join its results again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..arguments import check_type, comma_list, short_repr
from ..mxnet_private.arrays import (
    DTYPES,
    array_of,
    concat,
    slice_axis,
    to_context,
    write_sum,
)
from ..mxnet_private.tape import variables_behind
from ..nested import arrays_in, flatten, rebuild


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
    ) -> Shards:
        """Split the rows of `leaves`, which are the flattened `args`.

        Leaves without rows go to each context. Contexts that get no row are left out.
        """
        _check_no_shards(args, contexts)
        are_split = [
            hasattr(x, "dtype") and len(getattr(x, "shape", ())) > 0 for x in leaves
        ]
        count = number_of_rows(compress(leaves, are_split), axis)
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
    if not isinstance(batch, mx.nd.NDArray):
        index: Any = [slice(None)] * batch.ndim
        shards = []
        for context, (begin, end) in zip(contexts, bounds):
            index[batch_axis] = slice(begin, end)
            shards.append(array_of(batch[tuple(index)], context))
        return shards
    # MXNet's indexing would ask for the batch's shape 20 times.
    rows, axis = batch.detach().as_nd_ndarray(), {"axis": batch_axis}
    shards = [slice_axis(rows, begin=b, end=e, **axis) for b, e in bounds]
    shards = [to_context(x, context) for x, context in zip(shards, contexts)]
    is_np = isinstance(batch, mx.np.ndarray)
    return [shard.as_np_ndarray() for shard in shards] if is_np else shards


def join_shards(shards: Sequence, axis: int | None, context: mx.Context) -> Any:
    """Concatenate arrays, or add them if `axis` is None.

    If the shards are other objects, return the first one.
    """
    if not isinstance(shards[0], mx.nd.NDArray):
        return shards[0]
    if len(shards) == 1:
        return to_context(shards[0], context)
    if context.device_type == "gpu":
        shards = [to_context(x, context) for x in shards]
    if axis is None:
        total = mx.nd.empty(shards[0].shape, context, shards[0].dtype)
        write_sum(shards, total)
        return total
    is_np = isinstance(shards[0], mx.np.ndarray)
    return mx.np.concatenate(shards, axis) if is_np else concat(*shards, dim=axis)


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


def check_outputs(outputs: Sequence, leaves: Sequence, shards: Shards) -> None:
    """Raise ValueError unless the devices' outputs can be joined along the rows."""
    axis, found = shards.axis, []
    for output, items, rows in zip(outputs, leaves, shards.rows):
        texts = [_describe(k, leaf, axis, rows) for k, leaf in enumerate(items)]
        is_leaf = len(items) == 1 and items[0] is output
        found.append(texts[0] if is_leaf else str(rebuild(output, iter(texts))))
    for context, description in zip(shards.contexts, found):
        if description != found[0]:
            raise ValueError(
                "the outputs must have the same structure, types, dtypes and shapes on "
                f"all devices, apart from the rows (*) along axis {axis}, got "
                f"{found[0]} on {shards.contexts[0]} and {description} on {context}"
            )


def _describe(number, leaf, axis, rows):
    """Return an output's type, dtype and shape, with a star for the rows."""
    if not isinstance(leaf, mx.nd.NDArray):
        if isinstance(leaf, Iterator) or arrays_in(dict(getattr(leaf, "__dict__", {}))):
            raise ValueError(
                f"output {number} must be an array, or a list, tuple or dict of "
                f"arrays, got an object with arrays of one device: {short_repr(leaf)}. "
                "Return its arrays."
            )
        return type(leaf).__name__
    sizes = leaf.shape
    shape = list(map(str, sizes))
    if not -len(sizes) <= axis < len(sizes) or sizes[axis] != rows:
        raise ValueError(
            f"output {number} must have {rows} rows along axis {axis} like the input, "
            f"got shape {sizes} on {leaf.context}. Return one value per row, also "
            "from a loss inside the net."
        )
    shape[axis] = "*"
    return f"{type(leaf).__name__} {np.dtype(leaf.dtype)} ({', '.join(shape)})"
