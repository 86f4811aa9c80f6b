"""Synchronized batch normalization for MXNet Gluon."""

from . import distributed
from ._library import features
from ._library import load as _load
from ._version import __version__
from .batch_norm import SyncBatchNorm
from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .devices import Devices
from .failures import get_timeout, recover, set_timeout

__all__ = [
    "Devices",
    "SyncBatchNorm",
    "__version__",
    "convert_sync_batchnorm",
    "distributed",
    "features",
    "get_timeout",
    "recover",
    "revert_sync_batchnorm",
    "set_timeout",
]

_load()  # registers the operator, so that symbols from files find it
