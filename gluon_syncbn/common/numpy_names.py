"""Restore NumPy aliases that MXNet and GluonCV use and newer versions of NumPy lack.

This module is imported before MXNet. It does not change names that NumPy has, so it
changes nothing with NumPy below 1.24.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np


def _in1d(ar1, ar2, *arguments, **options):
    return np.isin(np.ravel(ar1), ar2, *arguments, **options)


def _moved(*_arguments, **_options):
    raise NotImplementedError("this function has moved to the package numpy_financial")


_NAMES = {
    # mxnet/numpy/multiarray.py, mxnet/ndarray/numpy/_op.py and symbol/numpy/_symbol.py
    "bool": bool,
    # gluoncv/model_zoo/rcnn/rpn/anchor.py, gluoncv/utils/metrics/coco_detection.py
    "float": float,
    # gluoncv/model_zoo/hrnet.py, mxnet/test_utils.py
    "int": int,
    # mxnet/gluon/contrib/estimator/event_handler.py, gluoncv/auto/estimators/utils.py
    "Inf": np.inf,
    # mxnet/numpy/utils.py
    "NAN": np.nan,
    "NaN": np.nan,
    "NINF": -np.inf,
    "NZERO": -0.0,
    "PINF": np.inf,
    "PZERO": 0.0,
    # mxnet/numpy_dispatch_protocol.py
    "product": np.prod,
    "round_": np.round,
    "sometrue": np.any,
    # mxnet/numpy/fallback.py
    "alltrue": np.all,
    "in1d": _in1d,
    "msort": lambda a: np.sort(a, axis=0),
    "trapz": getattr(np, "trapezoid", None),
    **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), _moved),
    # mx.np.pad, in mxnet/ndarray/numpy/_op.py and mxnet/symbol/numpy/_symbol.py
    "compat": SimpleNamespace(basestring=str),
}


def _has(name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names are only deprecated
        return hasattr(np, name)


for _name, _value in _NAMES.items():
    if not _has(_name):
        setattr(np, _name, _value)
