"""The native operator, which reads and writes oneDNN's layouts on CPUs.

The operator is in src/mxnet/native_op.cc, and docs/design/native_operator.md explains
it. Where it cannot be used, layer/guards.py makes MXNet's operator ``Custom`` safe.
"""

from __future__ import annotations

import threading
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..mxnet_private.arrays import invoke
from ..mxnet_private.tape import differentiate
from ..native.library import load
from . import guards
from .synchronization import Settings, Synchronization

NAME = "_gluon_syncbn"
_test_lock = threading.Lock()
_test_results: list[str] = []  # the result of the only test, once it has run


def is_used(context: mx.Context | None = None) -> bool:
    """Return True if layers (on a context, if one is given) run this operator."""
    return (context is None or context.device_type == "cpu") and not missing()


def missing() -> str:
    """Return the reason why the native operator is not used, or an empty text."""
    if not _test_results:
        with _test_lock:
            reason = load().gluon_syncbn_native_missing()
            if not reason and load().gluon_syncbn_failure():
                return "a layer has failed"  # so a test would fail, and the call also
            if not _test_results:
                _test_results.append(reason or _test())
    return _test_results[0]


def call(operands: Sequence, **attributes: str) -> mx.nd.NDArray:
    """Call the operator of a layer imperatively."""
    return invoke(NAME, operands, op_type="gluon_syncbn", native="True", **attributes)


def rename(node: dict) -> None:
    """Make a node of a graph run the native operator."""
    node["op"], node["attrs"]["native"] = NAME, "True"


def _test():
    """Compare a step of convolution, layer, convolution with the plain way."""
    try:
        results, expected = _step(NAME), _step("Custom")
    except Exception as error:  # whatever it is, the plain way remains
        return f"its test has failed: {error}"
    for result, other in zip(results, expected):
        # Convolutions sum products in another order if layouts differ.
        if not abs(result - other).max() <= 1e-4 * abs(other).max():
            return "its test has computed other results than the plain way"
    return ""


def _step(operator):
    layer = Synchronization("gluon_syncbn's test", Settings(group="process"))
    options = {"axis": 1, "eps": 1e-5, "momentum": 0.9, "fix_gamma": False}
    layer.update([mx.cpu()], options)
    rng, channels = np.random.default_rng(0), 16  # these many channels get a block
    shapes = [(2, 16, 6, 6), (16, 16, 3, 3), *[(channels,)] * 4]
    arrays = [mx.nd.array(rng.uniform(0.5, 2, shape), mx.cpu()) for shape in shapes]
    variables, statistics = arrays[:4], arrays[4:]
    autograd.mark_variables(variables, [a.copy() for a in variables])
    x, weight, *parameters = variables
    convolution = {"kernel": "(3, 3)", "num_filter": "16", "no_bias": "True"}
    node = {"op_type": "gluon_syncbn", "layer_key": layer.key}
    with autograd.record():
        y = invoke("Convolution", [x, weight], **convolution)
        operands = [y, *parameters, *statistics]
        if operator == NAME:
            z = call(operands, layer_key=layer.key)
        else:
            z = guards.call_plainly(y, lambda: invoke(operator, operands, **node))
        outputs = invoke("Convolution", [z, weight], **convolution)
    differentiate([outputs], [outputs], [], False, True)
    results = outputs, *(a.grad for a in variables), *statistics
    return [result.asnumpy() for result in results]
