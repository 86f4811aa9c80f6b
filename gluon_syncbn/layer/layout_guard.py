"""The guard of a layer against MXNet's early release of oneDNN copies.

MXNet 1.9.1 frees the plain copy of a blocked input as soon as an asynchronous operator
(ours) is *queued* (``PushOperator`` in imperative_utils.h). So inputs and gradients are
made plain before; docs/design/mxnet.md says how. A guard may be for one mode or kind of
device only; an exported graph of such a guard refuses to run (CheckGuard in
src/mxnet/guard.cc), and nets are reverted before an export.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.mxnet_version import IS_GLUON_2
from ..mxnet_private.blocks import Trace

# That a guard's nodes carry in a graph; those of Gluon 2 can carry nothing.
_MARK = {"__gluon_syncbn_guard__": "True"}
_MARKED: dict = {} if IS_GLUON_2 else {"attr": _MARK}


def is_guard(node: dict) -> bool:
    """Tells whether a node of a graph is part of a guard."""
    return _MARK.items() <= node.get("attrs", {}).items()


def guard_kind(
    contexts: Sequence[mx.Context], layer: Any, is_graph: bool, trace: Trace | None
) -> str:
    """The kind of guard that a layer needs, see src/mxnet/guard.h.

    `contexts` are those where the layer runs, empty if they are not known; `is_graph`
    says whether it becomes part of a graph. The kinds are:

    * ``"gpu"``: none, because no context is a CPU;
    * ``"outside"``: `make_plain` and `plain_gradient`, which the layer's caller runs
      (a hybridized layer of Gluon 2 has none);
    * ``"static_shape"``: after the layer an operator that works in place;
    * ``"any"``: copies, which are right in every mode; also for a symbol outside of a
      trace, because it is not known how its graph will run.
    """
    if contexts and all(context.device_type == "gpu" for context in contexts):
        return "gpu"
    is_outermost = trace is not None and trace.block is layer and not IS_GLUON_2
    if not is_graph or is_outermost:
        return "outside"
    return "static_shape" if trace is not None and trace.is_static_shape else "any"


def plain_gradient(y: mx.nd.NDArray) -> mx.nd.NDArray:
    """A view of `y` whose gradient reaches `y` in the plain layout."""
    if y.context.device_type == "gpu" or not autograd.is_recording():
        return y
    if isinstance(y, mx.np.ndarray):
        return y.as_nd_ndarray().reshape(y.shape).as_np_ndarray()
    return y.reshape(y.shape)


def count_dimensions(x: Any, guard: str, trace: Trace | None) -> int:
    """Return the number of dimensions of x and y; 0 if it is unknown or not needed.

    MXNet infers it for all that the graph has so far, which takes most of a trace.
    """
    return 0 if guard in ("gpu", "outside") else len(traced_shape(x, trace))


def guarded_input(F: Any, x: Any, guard: str, ndim: int) -> Any:
    """The operator's input after the guard: plain when the operator is queued."""
    if guard in ("gpu", "outside"):
        return x
    if 1 <= ndim <= 4:
        # Converts oneDNN's blocked layout to row-major (in place if allowed); a no-op
        # for row-major arrays. With more dimensions it would not. A static_shape graph
        # would be right without it, but would keep a plain copy of each x.
        return F.reshape(x, shape=(-2,), **_MARKED)
    # Not amp_multicast: its backward does not add to the gradient of a graph's input.
    return F.SliceChannel(x, num_outputs=1, **_MARKED)


def guarded_output(F: Any, y: Any, guard: str, ndim: int, trace: Trace | None) -> Any:
    """The operator's output after the guard: its gradient will be plain."""
    if guard in ("gpu", "outside"):
        return y
    if guard == "static_shape":
        # In place, so that no output of the graph is the layer's: MXNet runs nodes with
        # one as in other modes (src/imperative/cached_op.cc, StaticInitExec:
        # dynamic_entries). Not an identity: MXNet cannot infer the storage type of its
        # gradient where the graph's output is the sum of y and an input without one.
        if _dtype(y, trace) == "float32":
            return F.amp_multicast(y, num_outputs=1, **_MARKED)
        # It would copy blocked gradients, which other dtypes do not have.
        return F.reshape(y, shape=(-2,), **_MARKED)
    if ndim == 4:
        # Plain in one pass, because it reads blocked layouts; never in place.
        return F.transpose(y, axes=(0, 1, 2, 3), **_MARKED)
    return F.SliceChannel(y, num_outputs=1, **_MARKED)


def traced_shape(value: Any, trace: Trace | None) -> tuple[int, ...]:
    """Return the shape of an array or traced symbol, with 0 for an unknown size; of a
    symbol that nothing is known of, ().
    """
    if hasattr(value, "shape"):
        return tuple(value.shape)
    shapes = {} if trace is None else _read(value, trace.inputs, "shape")
    outputs = shapes and value.infer_shape_partial(**shapes)[1]
    return tuple(outputs[0] or ()) if outputs else ()


def _dtype(symbol, trace):
    """The dtype of a traced symbol as text; None if unknown."""
    if IS_GLUON_2:
        return np.dtype(symbol.dtype).name
    # A parameter's symbol knows the dtype of its first use only.
    arrays = {**trace.inputs, **trace.block.collect_params()}
    dtypes = _read(symbol, arrays, "dtype")
    outputs = dtypes and symbol.infer_type_partial(**dtypes)[1]
    return np.dtype(outputs[0]).name if outputs and outputs[0] else None


def _read(symbol, arrays, of):
    """Shapes or dtypes of what `symbol` depends on; MXNet refuses other names."""
    names = {name for name, array in arrays.items() if hasattr(array, of)}
    return {name: getattr(arrays[name], of) for name in names & {*symbol.list_inputs()}}
