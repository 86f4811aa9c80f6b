"""Train in several processes: ``mpirun -n 8 python train.py``.

After :func:`init` each layer exchanges its statistics over MPI, once per phase and
process. :class:`Trainer` also sums gradients over MPI; MXNet's kvstore or Horovod can
do that instead. Use mpi4py to sum metrics. Nothing needs MPI before :func:`init`.
"""

from .parameters import broadcast_parameters
from .processes import (
    groups_of,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .sampler import ShardSampler
from .trainer import Trainer

__all__ = [
    "ShardSampler",
    "Trainer",
    "broadcast_parameters",
    "groups_of",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
