"""Refuses an MXNet that this package does not work with.

``__init__.py`` imports it first, before another module fails over what such an MXNet
lacks. docs/versions.md lists the versions that were tried.
"""

from __future__ import annotations

import re

import mxnet as mx

_SUPPORTED = re.compile(r"1\.[6-9](\D|$)")


def check(version: str) -> None:
    """Raises ImportError unless `version` is of the series 1.6 to 1.9."""
    if not _SUPPORTED.match(version):
        raise ImportError(
            "gluon_syncbn works with MXNet 1.6 to 1.9.1, but the installed mxnet is "
            f"{version}; `pip install mxnet==1.9.1` installs one that it works with"
        )


check(mx.__version__)
