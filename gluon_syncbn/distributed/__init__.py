"""Several processes: ``mpirun -n 8 python train.py``.

Statistics travel over MPI, in one exchange per layer, phase and process. Gradients go
over MPI too (:class:`Trainer`), over MXNet's kvstore, or over Horovod. Metrics are
mpi4py's matter. Nothing needs MPI before :func:`init` is called. It must not know which
devices a process trains on.
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
