"""This module tells which MXNet is there, and refuses one that does not serve.

It must not know the rest of the package. docs/guides/mxnet2.md has the versions tried.
"""

from __future__ import annotations

import re
import sys

from . import numpy_names  # noqa: F401

# isort: split
try:
    import mxnet as mx
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    command = "`pip install mxnet==1.9.1`"
    if sys.version_info >= (3, 13):  # the NumPy that MXNet pins has no wheels for it
        command = (
            "`pip install --no-deps mxnet==1.9.1` and "
            "`pip install requests 'graphviz<0.9'`"
        )
    raise ModuleNotFoundError(
        "gluon_syncbn needs MXNet, which comes as one of several packages and is not "
        f"installed: {command}, or mxnet-cu112 for GPUs",
        name="mxnet",
    ) from None
except OSError as error:
    found = re.match(r"lib(cu|nccl|nv|gomp|quadmath)\S+(?=: cannot open)", str(error))
    if found is None:
        raise
    library = found[0]
    if library.startswith(("libgomp", "libquadmath")):
        raise ImportError(
            f"MXNet does not find {library}, which comes with GCC: without a compiler "
            "`apt install libgomp1 libquadmath0` on Debian and Ubuntu"
        ) from None
    cure = (
        "`pip install '.[cuda]'` in a clone of gluon_syncbn installs mxnet-cu112 with "
        "all libraries of CUDA that it loads, and LD_LIBRARY_PATH has to name their "
        "folders"
    )
    if library == "libcuda.so.1":
        cure = (
            "it is of NVIDIA's driver, which no pip command installs; without a GPU "
            "use `pip uninstall mxnet mxnet-cu112` and `pip install mxnet==1.9.1`"
        )
    raise ImportError(
        f"MXNet for GPUs does not find {library}: {cure}, see "
        "docs/guides/install.md#mxnet-for-gpus"
    ) from None

_SUPPORTED = re.compile(r"(1\.[6-9]|2\.0)(\D|$)")


def check(version: str) -> None:
    """Raises ImportError unless `version` is of the series 1.6 to 1.9, or 2.0."""
    if not _SUPPORTED.match(version):
        raise ImportError(
            "gluon_syncbn works with MXNet 1.6 to 1.9.1 and 2.0, but the installed "
            f"mxnet is {version}; `pip install mxnet==1.9.1` installs one that it "
            "works with"
        )


check(mx.__version__)
# In it blocks have no names, compute with mx.np arrays alone, and are traced by calls
# with arrays that have no values yet.
IS_GLUON_2 = mx.__version__.startswith("2.")
Context = mx.Device if IS_GLUON_2 else mx.Context  # the class
