"""Masked data as a matrix (elements, channels) with the valid elements first.

The operator reads and writes only the first rows of the matrix, which are valid. So
padding does not change a bit of the result, and a device may have only padding.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from ..arguments import check_type


class MaskedElements:
    """The elements of a call with a mask, as symbols or arrays."""

    def __init__(self, F: Any, x: Any, mask: Any, axis: int) -> None:
        self._F, self._axis = F, axis
        mask = F.cast(F.BlockGrad(mask), dtype="float32")
        # The sum makes MXNet check the shapes, also in a graph.
        channel = F.slice_axis(F.BlockGrad(x), axis=axis, begin=0, end=1)
        channel = F.cast(F.zeros_like(channel), dtype="float32")
        mask = F.elemwise_add(F.expand_dims(mask, axis=axis), channel, name="mask")
        self._is_valid = F.reshape(self._swapped(mask), shape=(-1,)) != 0
        self._order = F.argsort(self._is_valid, is_ascend=False, dtype="int32")
        self._channels_last = self._swapped(x)

    def matrix(self) -> Any:
        """Return the elements of the data, the valid ones first."""
        elements = self._F.reshape(self._channels_last, shape=(-1, 0), reverse=True)
        return self._F.take(self._without_padding(elements), self._order)

    def count(self, matrix: Any) -> Any:
        """Return the number of valid elements, repeated for each channel."""
        F = self._F
        count = F.sum(F.cast(self._is_valid, dtype="float64"), axis=0, keepdims=True)
        # The shape of gamma may be unknown before the first call.
        channels = F.reshape(F.slice_axis(matrix, axis=0, begin=0, end=1), shape=(-1,))
        return F.broadcast_like(count, F.cast(F.BlockGrad(channels), dtype="float64"))

    def put_back(self, matrix: Any) -> Any:
        """Return a matrix's elements in the shape of the data, with 0 for padding."""
        F = self._F
        elements = F.contrib.index_copy(F.zeros_like(matrix), self._order, matrix)
        y = F.reshape_like(self._without_padding(elements), self._channels_last)
        return self._swapped(y)

    def _without_padding(self, elements):
        """Replace padding by zeros; its gradients are zeros also."""
        return self._F.where(self._is_valid, elements, self._F.zeros_like(elements))

    def _swapped(self, array):
        """Return an array with the axis of the channels in the last place, or back."""
        if self._axis == -1:
            return array
        return self._F.swapaxes(array, dim1=self._axis, dim2=-1)


def check_mask(layer: str, x: Any, mask: Any, axis: int) -> None:
    """Raise an error for a wrong mask, except for a shape in a graph."""
    kind = mx.nd.NDArray if isinstance(x, mx.nd.NDArray) else mx.sym.Symbol
    check_type("mask", mask, kind, f"{kind.__name__}, like data")
    if kind is mx.sym.Symbol:
        return
    axes = enumerate(x.shape)
    expected = tuple(size for k, size in axes if k not in (axis, axis + x.ndim))
    if mask.shape != expected:
        raise ValueError(
            f"SyncBatchNorm '{layer}': mask must have shape {expected}, the shape of "
            f"data without axis {axis}, got {mask.shape}"
        )
