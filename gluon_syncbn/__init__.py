"""Synchronized batch normalization for MXNet Gluon."""

from . import _mxnet_version, distributed, gluoncv  # noqa: F401
from ._library import features
from ._version import __version__
from .batch_norm import SyncBatchNorm
from .contexts import available_contexts
from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .devices import Devices
from .failures import get_timeout, recover, set_timeout
from .memory import keep_freed_memory
from .monitor import Monitor
from .parallel import ParallelCriterion, ParallelNet, ShardedOutput, make_parallel
from .participation import participating
from .plain_loop import allow_plain_loop
from .replicas import check_replicas

__all__ = [
    "Devices",
    "Monitor",
    "ParallelCriterion",
    "ParallelNet",
    "ShardedOutput",
    "SyncBatchNorm",
    "__version__",
    "allow_plain_loop",
    "available_contexts",
    "check_replicas",
    "convert_sync_batchnorm",
    "distributed",
    "features",
    "get_timeout",
    "gluoncv",
    "keep_freed_memory",
    "make_parallel",
    "participating",
    "recover",
    "revert_sync_batchnorm",
    "set_timeout",
]
