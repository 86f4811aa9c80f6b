"""Compatibility with versions of NumPy, onnx and MXNet.

Newer versions of NumPy and onnx lack names that MXNet and GluonCV use. This module
defines these names before it imports MXNet, and does not change names that exist. It
also loads CUDA libraries that pip installed, if the loader does not find them.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import numpy as np

__version__ = "0.6.0"  # the build parses this line without importing MXNet


def _in1d(ar1, ar2, *arguments, **options):
    return np.isin(np.ravel(ar1), ar2, *arguments, **options)


def _moved(*_arguments, **_options):
    raise NotImplementedError("this function has moved to the package numpy_financial")


_NAMES = {
    "bool": bool,
    "float": float,  # only GluonCV uses it
    "int": int,
    "Inf": np.inf,
    **dict.fromkeys(("NAN", "NaN"), np.nan),
    "NINF": -np.inf,
    "NZERO": -0.0,
    "PINF": np.inf,
    "PZERO": 0.0,
    "product": np.prod,
    "round_": np.round,
    "sometrue": np.any,
    "alltrue": np.all,
    "in1d": _in1d,
    "msort": lambda a: np.sort(a, axis=0),
    "trapz": getattr(np, "trapezoid", None),
    # MXNet looks these up when it is imported.
    **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), _moved),
    "compat": SimpleNamespace(basestring=str),  # mx.np.pad uses it
}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some names are only deprecated
    for _name, _value in _NAMES.items():
        if not hasattr(np, _name):
            setattr(np, _name, _value)


class _OnnxMapping:
    """Finds onnx.mapping if onnx lacks this module, which MXNet's export imports."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "onnx.mapping" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        from onnx import helper

        dtypes = map(np.dtype, "?bBhHiIlLefd")
        numbers = {dtype: helper.np_dtype_to_tensor_dtype(dtype) for dtype in dtypes}
        module.NP_TYPE_TO_TENSOR_TYPE = numbers
        module.TENSOR_TYPE_TO_NP_TYPE = {n: dtype for dtype, n in numbers.items()}


sys.meta_path.append(_OnnxMapping())  # last: onnx's own module wins

# The error of a library that the system's loader does not find.
_MISSING = re.compile(r"lib(cu|nccl|nv|gomp|quadmath)\S+(?=: cannot open)")


def _load_of_packages(library):
    """Load a library of NVIDIA's packages for pip; return False if there is none.

    The system's loader does not search their folders. Once a library is loaded, MXNet
    finds it by its name.
    """
    found = (file for p in sys.path for file in Path(p).glob(f"nvidia/*/lib/{library}"))
    file = next(found, None)
    if file is not None:
        ctypes.CDLL(str(file))
    return file is not None


def _import_mxnet():
    """Import MXNet, and again after each CUDA library that its first tries missed."""
    loaded = set()
    while True:
        try:
            return importlib.import_module("mxnet")
        except OSError as error:
            found = _MISSING.match(str(error))
            if not found or found[0] in loaded or not _load_of_packages(found[0]):
                raise
            loaded.add(found[0])
            # Otherwise the next import lacks the attributes of these modules.
            for name in [name for name in sys.modules if name.startswith("mxnet.")]:
                del sys.modules[name]


try:
    mx = _import_mxnet()
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    command = "`pip install mxnet==1.9.1`"
    if sys.version_info >= (3, 13):  # MXNet pins a NumPy without wheels for 3.13
        command = (
            "`pip install --no-deps mxnet==1.9.1` and "
            "`pip install requests 'graphviz<0.9'`"
        )
    raise ModuleNotFoundError(
        f"gluon_syncbn needs MXNet, which is not installed. Run {command}, or install "
        "mxnet-cu112 for GPUs.",
        name="mxnet",
    ) from None
except OSError as error:
    found = _MISSING.match(str(error))
    if found is None:
        raise
    library = found[0]
    fix = (
        "`pip install '.[cuda]'` in a clone of gluon_syncbn installs mxnet-cu112 and "
        "the CUDA libraries that it loads."
    )
    if library == "libcuda.so.1":
        fix = (
            "It is part of NVIDIA's driver, which pip cannot install. Without a GPU "
            "run `pip uninstall mxnet mxnet-cu112` and `pip install mxnet==1.9.1`."
        )
    elif found[1] in ("gomp", "quadmath"):
        fix = "On Debian or Ubuntu run `apt install libgomp1 libquadmath0`."
    raise ImportError(
        f"MXNet cannot find {library}. {fix} See docs/guides/install.md."
    ) from None

if not re.match(r"(1\.[6-9]|2\.0)(\D|$)", mx.__version__):
    raise ImportError(
        "the version of MXNet must be 1.6 to 1.9.1 or 2.0, got "
        f"{mx.__version__}. Run `pip install mxnet==1.9.1`."
    )
# Blocks of Gluon 2 have no names and accept only mx.np arrays. Gluon 2 traces a block
# with arrays that have no values, and Gluon 1 traces it with symbols.
IS_GLUON_2 = mx.__version__.startswith("2.")
Context = mx.Device if IS_GLUON_2 else mx.Context
