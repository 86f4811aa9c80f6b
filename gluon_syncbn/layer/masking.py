"""Masked data as a matrix (elements, channels) with the valid elements first.

The operator reads and writes only the valid elements. So the result is bitwise the
result for these alone, and a device may have only padding.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from ..arguments import check_type
from ..mxnet_private.blocks import Trace


class MaskedElements:
    """The elements of a call with a mask, as symbols or arrays."""

    def __init__(self, F: Any, x: Any, mask: Any, axis: int) -> None:
        self._F, self._x, self._axis = F, x, axis
        mask = F.cast(F.BlockGrad(mask), dtype="float32")
        # The sum makes MXNet check the shapes, also in a graph.
        channel = F.slice_axis(F.BlockGrad(x), axis=axis, begin=0, end=1)
        channel = F.cast(F.zeros_like(F.squeeze(channel, axis=axis)), dtype="float32")
        mask = F.elemwise_add(mask, channel, name="mask")
        self._channels_last = x
        if axis == 1:
            x = F.reshape(x, shape=(0, 0, -1))
            self._channels_last = F.swapaxes(x, dim1=1, dim2=2)
        self._is_valid = F.reshape(mask, shape=(-1,)) != 0
        self._order = F.argsort(self._is_valid, is_ascend=False, dtype="int32")

    def valid_first(self) -> Any:
        """Return the elements of the data, with padding last."""
        elements = self._F.reshape(self._channels_last, shape=(-1, 0), reverse=True)
        return self._F.take(self._without_padding(elements), self._order)

    def count(self, elements: Any) -> Any:
        """Return the number of valid elements, repeated for each channel."""
        F = self._F
        count = F.sum(F.cast(self._is_valid, dtype="float64"), axis=0, keepdims=True)
        # The shape of gamma may be unknown before the first call.
        channels = F.reshape(
            F.slice_axis(elements, axis=0, begin=0, end=1), shape=(-1,)
        )
        return F.broadcast_like(count, F.cast(F.BlockGrad(channels), dtype="float64"))

    def put_back(self, elements: Any) -> Any:
        """Return elements in the order and shape of the data, with 0 for padding."""
        F = self._F
        elements = F.contrib.index_copy(F.zeros_like(elements), self._order, elements)
        y = F.reshape_like(self._without_padding(elements), self._channels_last)
        if self._axis == 1:
            y = F.reshape_like(F.swapaxes(y, dim1=1, dim2=2), self._x)
        return y

    def _without_padding(self, elements):
        """Replace padding by zeros, whose gradients are zeros also."""
        return self._F.where(self._is_valid, elements, self._F.zeros_like(elements))


def check_mask(layer: str, x: Any, mask: Any, axis: int, trace: Trace | None) -> None:
    """Raise TypeError or ValueError unless a mask fits its data."""
    is_array = isinstance(x, mx.nd.NDArray)
    kind = mx.nd.NDArray if is_array else mx.sym.Symbol
    check_type("mask", mask, kind, f"{kind.__name__}, like data")
    shape, given = traced_shape(x, trace), traced_shape(mask, trace)
    if axis not in (1, -1, len(shape) - 1):
        raise ValueError(
            f"SyncBatchNorm '{layer}': with a mask axis must be 1, -1 or the last axis "
            f"of a known shape, got {axis}"
        )
    if not is_array and not (shape and given and all(shape + given)):
        return  # the operators check shapes that the graph does not know yet
    expected = list(shape)
    del expected[axis]
    if given != tuple(expected):
        raise ValueError(
            f"SyncBatchNorm '{layer}': mask must have shape {tuple(expected)}, the "
            f"shape of data without axis {axis}, got {given}"
        )


def traced_shape(value: Any, trace: Trace | None) -> tuple[int, ...]:
    """Return the shape of an array or traced symbol, with 0 for unknown sizes.

    It is () for a symbol about which nothing is known.
    """
    if hasattr(value, "shape"):
        return tuple(value.shape)
    inputs = {} if trace is None else trace.inputs
    known = {*value.list_inputs()}  # MXNet refuses other names
    shapes = {name: array.shape for name, array in inputs.items() if name in known}
    outputs = shapes and value.infer_shape_partial(**shapes)[1]
    return tuple(outputs[0] or ()) if outputs else ()
