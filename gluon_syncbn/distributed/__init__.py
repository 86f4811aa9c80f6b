"""Several processes: ``mpirun -n 8 python train.py``.

Statistics travel over MPI, in one exchange per layer, phase and process. Gradients go
over MPI too (:class:`Trainer`), or over Horovod. Nothing here needs MPI before
:func:`init` is called.
"""

from ._groups import groups_of
from .collectives import allgather, allreduce, barrier, broadcast
from .parameters import broadcast_parameters
from .sampler import ShardSampler
from .trainer import Trainer
from .world import (
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "ShardSampler",
    "Trainer",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_parameters",
    "groups_of",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
