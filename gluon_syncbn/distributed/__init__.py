"""Train in several processes: ``mpirun -n 8 python train.py``.

After :func:`init` each SyncBatchNorm synchronizes over MPI, in forward and in backward.
:class:`Trainer` sums gradients over MPI; MXNet's kvstore or Horovod can do that
instead. Use mpi4py to sum metrics. MPI is not needed before :func:`init`.
"""

from .collectives import broadcast_parameters
from .connection import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .training import Trainer

__all__ = [
    "Trainer",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
