"""The processes of the program: their ranks, and how they connect and part.

``native/world.py`` holds the state. It must not know MPI.
"""

from __future__ import annotations

from ..arguments import check_int
from ..native.world import connect, wait_seconds, world


def init(timeout: float | None = None) -> None:
    """Connects the processes that ``mpirun`` has started.

    From then on every :class:`gluon_syncbn.SyncBatchNorm` synchronizes with the layer
    of the same name in all other processes, see its argument `group`. Every process
    calls it, once or more often; further calls do nothing. mpi4py initializes MPI,
    unless Horovod has, and finalizes it when the program ends.

    Parameters
    ----------
    timeout : float or None, default None
        Seconds to wait for the other processes; None means
        :func:`gluon_syncbn.get_timeout`. Nothing can end MPI's own wait for processes
        that have not reached ``MPI_Init``, so this process then ends with status 1.

    Raises
    ------
    RuntimeError
        If mpi4py is missing, or gluon_syncbn was built without MPI or with another one
        than mpi4py's; if MPI was initialized without ``MPI_THREAD_MULTIPLE``; if
        the launcher's environment (``OMPI_COMM_WORLD_SIZE``, ``PMI_SIZE``,
        ``SLURM_NTASKS``, ``DMLC_NUM_WORKER`` and others) promises several processes and
        MPI knows of one only; if not all processes call it within the timeout, after
        which it may be called again; after :func:`shutdown`.
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
    seconds = wait_seconds(timeout)
    world().check_open()
    if not world().is_connected:
        connect(seconds)


def is_initialized() -> bool:
    """Tells whether ``init`` has connected this process.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.is_initialized()
    False
    """
    return world().is_connected


def rank() -> int:
    """This process's number, from 0; 0 before ``init``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.rank()
    0
    """
    return world().rank


def size() -> int:
    """The number of processes; 1 before ``init``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.size()
    1
    """
    return world().size


def local_rank() -> int:
    """This process's number among those of its machine; 0 before ``init``.

    With one GPU per process, train on ``mx.gpu(local_rank())``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.local_rank()
    0
    """
    return world().of_machine.index(world().rank)


def local_size() -> int:
    """The number of processes on this machine; 1 before ``init``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.local_size()
    1
    """
    return len(world().of_machine)


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
        distributed.shutdown()
        assert distributed.size() >= 1
    """
    world().leave()


def groups_of(k: int) -> list[list[int]]:
    """Cuts the processes into groups of `k`.

    Parameters
    ----------
    k : int
        Size of a group, at least 1. The last group has the rest.

    Returns
    -------
    list of lists of int
        Ranks, for the argument `group` of :class:`gluon_syncbn.SyncBatchNorm`.

    Raises
    ------
    ValueError
        If `k` is less than 1.
    TypeError
        If `k` is no int.

    Examples
    --------
    >>> from gluon_syncbn.distributed import groups_of
    >>> groups_of(2)
    [[0]]
    """
    check_int("k", k, minimum=1)
    ranks = list(range(size()))
    return [ranks[i : i + k] for i in range(0, len(ranks), k)]
