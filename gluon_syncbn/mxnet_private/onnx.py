"""MXNet's export to ONNX, which can be made to refuse a graph.

Called by ``layer/layout_guard.py``. MXNet has no hook before an export.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any, Callable

import mxnet as mx

_MODULES = (  # of MXNet since 1.9, and before
    "mxnet.onnx.mx2onnx._export_onnx",
    "mxnet.contrib.onnx.mx2onnx.export_onnx",
)


def check_before_export(check: Callable[[Any], None]) -> None:
    """Calls `check` with each symbol before MXNet makes an ONNX graph of it."""
    for name in _MODULES:
        kind = getattr(sys.modules.get(name), "MXNetGraph", None)
        if kind is not None:
            kind.create_onnx_graph_proto = _checked(kind.create_onnx_graph_proto, check)


def _checked(create, check):
    @wraps(create)
    def checked(self, sym, *arguments, **options):
        if isinstance(sym, mx.sym.Symbol):
            check(sym)
        return create(self, sym, *arguments, **options)

    return checked
