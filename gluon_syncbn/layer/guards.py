"""Make MXNet's operator ``Custom`` safe where the native operator cannot be used.

MXNet frees the row-major copies that it makes for a custom operator before the operator
reads them. A guard is an operator before or after a layer that makes the layer's input,
or the gradient of its output, plain: row-major instead of oneDNN's blocked layout. The
reasons for the guards of each mode are in docs/design/mxnet.md.
"""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..mxnet_private.arrays import make_plain
from ..mxnet_private.blocks import FORWARD_RUNS_GRAPH, BatchNormBase, current_build
from .symbols import from_nodes


def call_plainly(x: mx.nd.NDArray, call: Callable[[], mx.nd.NDArray]) -> mx.nd.NDArray:
    """Call a layer with a plain input, and return its output with a plain gradient."""
    make_plain(x)
    y = call()
    if y.context.device_type == "gpu" or not autograd.is_recording():
        return y
    # The gradient of a view is plain.
    view = y.as_nd_ndarray().reshape(y.shape)
    return view.as_np_ndarray() if isinstance(y, mx.np.ndarray) else view


def guarded(F: Any, value: Any) -> Any:
    """Return a copy of a value. A copy is a guard that is safe in every mode."""
    # amp_multicast is faster, but it ignores grad_req="add" of a graph's input.
    return F.SliceChannel(value, num_outputs=1)


def guards_of(nodes: list, layers: set) -> dict:
    """Return {number of a guard of these layers: True if it is after a layer}."""
    found = {}
    for number, node in enumerate(nodes):
        before = node["inputs"][0][0] if node["inputs"] else -1
        if number in layers and _is_guard(nodes[before]):
            found[before] = False
        if before in layers and _is_guard(node):
            found[number] = True
    return found


def _is_guard(node):
    return node["op"] == "SliceChannel" and node["attrs"]["num_outputs"] == "1"


def choose_guards(symbol: Any, graph: dict, guards: dict, is_static: bool) -> dict:
    """Replace the guards of a graph by cheaper ones; return those that it needs not."""
    block = current_build()[0]
    # A layer that is hybridized alone makes its arrays plain in `forward`.
    if isinstance(block, BatchNormBase) and FORWARD_RUNS_GRAPH:
        return guards
    inferred = _infer(symbol, graph, list(guards))
    for (number, is_after), (ndim, dtype) in zip(guards.items(), inferred):
        if not is_after:
            # A Reshape of up to 4 dimensions copies only if it must.
            if 1 <= ndim <= 4:
                _replace(graph["nodes"][number], "Reshape", shape="(-2,)")
        elif not is_static:
            # The gradient of a transpose is another transpose, which always copies.
            if ndim == 4:
                _replace(graph["nodes"][number], "transpose", axes="(0, 1, 2, 3)")
        elif dtype == "float32":
            # A layer must not compute an output of a static_shape graph, so another
            # node follows it. A Reshape would be slower than amp_multicast, because it
            # copies gradients in blocked layouts.
            _replace(graph["nodes"][number], "amp_multicast", num_outputs="1")
        elif dtype is not None:  # only float32 gradients have blocked layouts
            _replace(graph["nodes"][number], "Reshape", shape="(-2,)")
    return {}


def _replace(node, operator, **attributes):
    node.update(op=operator, attrs=attributes)


def _infer(symbol, graph, numbers):
    """Return the number of dimensions, or 0, and the dtype, or None, of each node."""
    block, inputs = current_build()
    if block is None or not numbers:
        return [(0, None)] * len(numbers)
    heads = [[number, 0, 0] for number in numbers]
    outputs = from_nodes(symbol, dict(graph), graph["nodes"], heads)
    # A later cast of a parameter p does not change p.var(), so dtypes are read from p.
    arrays = {p.var().name: p for p in block.collect_params().values()}
    arrays.update(inputs)
    known = [name for name in outputs.list_inputs() if name in arrays]
    dtypes = {name: np.dtype(arrays[name].dtype).type for name in known}
    shapes = {name: tuple(arrays[name].shape or ()) for name in known}
    least = 0 if mx.util.is_np_shape() else 1  # a size of 0 may mean unknown
    shapes = {name: s for name, s in shapes.items() if s and min(s) >= least}
    _, shapes_of_outputs, _ = outputs.infer_shape_partial(**shapes)
    _, types_of_outputs, _ = outputs.infer_type_partial(**dtypes)
    return [
        (len(shape or ()), None if dtype is None else np.dtype(dtype).name)
        for shape, dtype in zip(shapes_of_outputs, types_of_outputs)
    ]
