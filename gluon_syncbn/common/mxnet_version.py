"""Refuses an MXNet that is missing, or that this package does not work with.

Called by ``__init__.py`` before another module fails over what such an MXNet lacks. It
must not know the rest of the package. docs/versions.md lists the versions tried.
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

_SUPPORTED = re.compile(r"1\.[6-9](\D|$)")


def check(version: str) -> None:
    """Raises ImportError unless `version` is of the series 1.6 to 1.9."""
    if not _SUPPORTED.match(version):
        raise ImportError(
            "gluon_syncbn works with MXNet 1.6 to 1.9.1, but the installed mxnet is "
            f"{version}; `pip install mxnet==1.9.1` installs one that it works with"
        )


check(mx.__version__)
