"""Synchronized batch normalization for MXNet Gluon."""

# A wrong version of MXNet raises a clear error here, before other modules fail.
from .compat import __version__

# isort: split
from . import distributed, gluoncv
from .contexts import available_contexts
from .conversion import convert_sync_batchnorm, freeze_statistics, revert_sync_batchnorm
from .distributed.collectives import check_replicas
from .layer.batch_norm import SyncBatchNorm
from .monitor import Monitor
from .native.failures import recover
from .native.library import features
from .native.timeouts import get_timeout, set_timeout
from .parallel.devices import Devices
from .parallel.make_parallel import make_parallel, revert_parallel
from .parallel.plain_loop import allow_plain_loop
from .statistics import recompute_statistics

__all__ = [
    "Devices",
    "Monitor",
    "SyncBatchNorm",
    "__version__",
    "allow_plain_loop",
    "available_contexts",
    "check_replicas",
    "convert_sync_batchnorm",
    "distributed",
    "features",
    "freeze_statistics",
    "get_timeout",
    "gluoncv",
    "make_parallel",
    "recompute_statistics",
    "recover",
    "revert_parallel",
    "revert_sync_batchnorm",
    "set_timeout",
]
