"""The processes of the program: their ranks, and how they connect and part.

Called by users and by the other files of this folder. It must not know what is
exchanged.
"""

from __future__ import annotations

import atexit
import os

import mxnet as mx

from . import failures, mpi
from .library import load

_world = None


class _World:
    def __init__(self, library, mpi, rank, machines):
        self.library, self.mpi = library, mpi
        self.rank, self.size, self.machines = rank, len(machines), machines
        self.pid = os.getpid()
        self.left = False

    def of_machine(self):
        """The ranks on this rank's machine."""
        own = self.machines[self.rank]
        return [rank for rank, other in enumerate(self.machines) if other == own]


def init(timeout: float | None = None) -> None:
    """Connects the processes that ``mpirun`` has started.

    From then on every :class:`gluon_syncbn.SyncBatchNorm` synchronizes with the layer
    of the same name in all other processes, see its argument `group`. Every process
    calls it, once or more often; further calls do nothing. MPI is used as mpi4py or
    Horovod have initialized it, if they have; otherwise it is initialized here and
    finalized when the program ends.

    Parameters
    ----------
    timeout : float or None, default None
        Seconds to wait for the other processes; None means
        :func:`gluon_syncbn.get_timeout`.

    Raises
    ------
    RuntimeError
        If gluon_syncbn was built without MPI, or MPI is not found; if MPI was
        initialized without ``MPI_THREAD_MULTIPLE``; if mpi4py runs on another MPI; if
        the launcher's environment (``OMPI_COMM_WORLD_SIZE``, ``PMI_SIZE``,
        ``SLURM_NTASKS`` and others) promises several processes and MPI knows of one
        only; if not all processes call it within the timeout, after which it may be
        called again; after :func:`shutdown`.
    ValueError
        If `timeout` is no positive number.

    Examples
    --------
    With ``mpirun -n 2 python program.py``:

    .. code-block:: python

        from gluon_syncbn import distributed

        distributed.init()
        print(f"this is rank {distributed.rank()} of {distributed.size()}")
    """
    global _world
    seconds = wait_seconds(timeout)
    if _world is not None:
        if _world.left:
            raise RuntimeError("distributed.init() was called after shutdown()")
        return
    library, mpi_library = load(), mpi.load()
    try:
        size = mpi.initialize(mpi_library)
    except RuntimeError:
        atexit.register(mpi_library.gluon_syncbn_mpi_finalize)
        raise
    transport, machines = mpi.transport(mpi_library, size, seconds)
    rank = library.gluon_syncbn_distributed_open(transport)
    if rank < 0:
        raise RuntimeError(library.gluon_syncbn_last_error().decode())
    _world = _World(library, mpi_library, rank, machines)
    # It runs before the handler of failures.py, which was registered earlier.
    atexit.register(_end)


def wait_seconds(timeout: float | None) -> float:
    """`timeout`, or the default one, as a checked number of seconds."""
    if timeout is None:
        return failures.get_timeout()
    return failures.check_timeout(timeout)


def world() -> _World:
    """The connected world; RuntimeError if there is none."""
    if _world is None:
        raise RuntimeError("gluon_syncbn.distributed.init() was not called")
    return _world


def is_initialized() -> bool:
    """Tells whether ``init`` has connected this process.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.is_initialized()
    False
    """
    return _world is not None


def rank() -> int:
    """This process's number, from 0; 0 before ``init``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.rank()
    0
    """
    return _world.rank if _world else 0


def size() -> int:
    """The number of processes; 1 before ``init``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.size()
    1
    """
    return _world.size if _world else 1


def local_rank() -> int:
    """This process's number among those of its machine; 0 before ``init``.

    With one GPU per process, train on ``mx.gpu(local_rank())``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.local_rank()
    0
    """
    return _world.of_machine().index(_world.rank) if _world else 0


def local_size() -> int:
    """The number of processes on this machine; 1 before ``init``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.local_size()
    1
    """
    return len(_world.of_machine()) if _world else 1


def join(timeout: float | None = None) -> int:
    """Contributes nothing to the others' exchanges, until all have joined.

    To be called where a process has no batch left while others may have: at the end of
    an epoch, by every process. Its layers count as empty shards and its gradients as
    zero meanwhile. Its parameters and running statistics stay as they are, so give it
    those of the returned rank: :meth:`Trainer.join` does all of it.

    Parameters
    ----------
    timeout : float or None, default None
        Seconds without any sign of the others before they are asked whether they are
        alive; None means :func:`gluon_syncbn.get_timeout`. How long they train is not
        limited.

    Returns
    -------
    int
        The rank that took part in the most exchanges, the lowest of several; the same
        on every rank.

    Raises
    ------
    mxnet.MXNetError
        If a rank fails, has left, or does not answer.

    Examples
    --------
    Rank 1 has one batch more than rank 0:

    .. code-block:: python

        import mxnet as mx
        from gluon_syncbn import SyncBatchNorm, distributed

        distributed.init()
        layer = SyncBatchNorm()
        layer.initialize()
        for _ in range(1 + distributed.rank()):
            with mx.autograd.train_mode():
                layer(mx.nd.ones((3, 2)))
        assert distributed.join() == 1
    """
    seconds = wait_seconds(timeout)
    if size() == 1:
        return rank()
    mx.nd.waitall()
    library = world().library
    last = library.gluon_syncbn_distributed_join(seconds)
    if last < 0:
        raise failures.error(library.gluon_syncbn_last_error().decode())
    return last


def shutdown() -> None:
    """Leaves the other processes, without waiting for them.

    Not needed at the end of a program. Others that wait for this rank, and layers that
    train in it afterwards, raise :class:`mxnet.MXNetError`. May be called before or
    after Horovod or mpi4py are shut down, and more than once.

    Examples
    --------
    .. code-block:: python

        from gluon_syncbn import distributed

        distributed.init()
        total = distributed.allreduce(1)
        distributed.shutdown()
        assert total == distributed.size()
    """
    if _world is None or _world.left:
        return
    mx.nd.waitall()
    _world.left = True
    _world.library.gluon_syncbn_distributed_leave()


def _end():
    """Leaves the other processes when the interpreter exits."""
    if os.getpid() != _world.pid:
        return  # in a fork: MPI belongs to the parent
    library = _world.library
    library.gluon_syncbn_distributed_leave()
    failures.give_up("the Python interpreter exits")  # nothing of ours is in flight now
    # MPI_Finalize waits for all ranks with a busy processor, and for ever if one has
    # died: so all have to have left before.
    own_mpi = _world.mpi.gluon_syncbn_mpi_owned()
    patience = failures.get_timeout() if own_mpi else 0.0
    if library.gluon_syncbn_distributed_stop(patience) and own_mpi:
        _world.mpi.gluon_syncbn_mpi_finalize()
