"""Metrics over all processes, by mpi4py where there are several."""

from gluon_syncbn import distributed


def summed(value):
    """The sum of a number or an array over all processes."""
    return _world().allreduce(value) if distributed.size() > 1 else value


def of_rank0(value):
    """The value that rank 0 has given."""
    return _world().bcast(value) if distributed.size() > 1 else value


def _world():
    from mpi4py import MPI

    return MPI.COMM_WORLD
