"""Masks: normalize only the elements of the data that are no padding.

The elements become a matrix (elements, channels) with the valid elements first. The
layer's operator gets their number as one more input, and reads and writes only these
rows. So results are bitwise equal whatever padding contains, also if all rows are
padding.
"""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx

from ..arguments import check_type


def check_mask(name: str, x: Any, mask: Any, axis: int) -> None:
    """Raise TypeError or ValueError unless a mask fits the data of a layer."""
    kind = mx.nd.NDArray if isinstance(x, mx.nd.NDArray) else mx.sym.Symbol
    check_type("mask", mask, kind, f"{kind.__name__}, like data")
    if kind is mx.sym.Symbol:
        return
    axes = enumerate(x.shape)
    expected = tuple(size for k, size in axes if k not in (axis, axis + x.ndim))
    if mask.shape != expected:
        raise ValueError(
            f"SyncBatchNorm '{name}': mask must have shape {expected}, the shape of "
            f"data without axis {axis}, got {mask.shape}"
        )


def normalize_valid(
    F: Any, x: Any, mask: Any, axis: int, normalize: Callable[[Any, Any], Any]
) -> Any:
    """Return `normalize(matrix, count)` in the shape of x, with 0 for padding.

    `count` is the number of valid elements, repeated for each channel.
    """

    def swapped(array):
        return array if axis == -1 else F.swapaxes(array, dim1=axis, dim2=-1)

    def without_padding(elements):  # its gradients are also 0
        return F.where(is_valid, elements, F.zeros_like(elements))

    mask = F.cast(F.BlockGrad(mask), dtype="float32")
    # The mask is added to zeros, so that MXNet checks its shape, also in a graph.
    channel = F.slice_axis(F.BlockGrad(x), axis=axis, begin=0, end=1)
    channel = F.cast(F.zeros_like(channel), dtype="float32")
    mask = F.elemwise_add(F.expand_dims(mask, axis=axis), channel, name="mask")
    is_valid = F.reshape(swapped(mask), shape=(-1,)) != 0
    order = F.argsort(is_valid, is_ascend=False, dtype="int32")
    channels_last = swapped(x)
    elements = F.reshape(channels_last, shape=(-1, 0), reverse=True)
    matrix = F.take(without_padding(elements), order)
    count = F.sum(F.cast(is_valid, dtype="float64"), axis=0, keepdims=True)
    row = F.reshape(F.slice_axis(matrix, axis=0, begin=0, end=1), shape=(-1,))
    count = F.broadcast_like(count, F.cast(F.BlockGrad(row), dtype="float64"))
    matrix = normalize(matrix, count)
    elements = F.contrib.index_copy(F.zeros_like(matrix), order, matrix)
    return swapped(F.reshape_like(without_padding(elements), channels_last))
