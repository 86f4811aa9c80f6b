"""Connect the processes of the program, number them, and leave them.

The native library sends the layers' messages over a communicator of mpi4py.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time

import mxnet as mx

from ..native import failures
from ..native.library import declare, load, mpi_path
from ..native.processes import World, allgather, set_world, world
from ..native.program_lines import warn
from ..native.timeouts import get_timeout, wait_seconds

# Launchers set these to how many processes the program has, or has on this machine.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_NRANKS",
    "SLURM_NTASKS",
    "DMLC_NUM_WORKER",
)

_SIGNATURES = {
    "gluon_syncbn_mpi_initialized": (ctypes.c_int, []),
    "gluon_syncbn_mpi_transport": (ctypes.c_void_p, [ctypes.c_int]),
}


def _leave_at_exit():
    load().gluon_syncbn_distributed_leave()
    failures.finish_work()  # no operator uses MPI after this
    # mpi4py finalizes MPI after all exit handlers. MPI_Finalize would occupy a
    # processor while it waits for all ranks, so this call waits for them first.
    load().gluon_syncbn_distributed_stop(get_timeout())


def init(timeout: float | None = None) -> None:
    """Connect the processes that ``mpirun`` has started.

    Every :class:`gluon_syncbn.SyncBatchNorm` then synchronizes with the layer of the
    same name in all other processes, or in the processes of its `group`. Every process
    must call this function. Further calls do nothing. mpi4py initializes MPI, unless
    Horovod has done so. Without ``mpirun`` a warning says that the process is alone.

    Parameters
    ----------
    timeout : float or None, default None
        Seconds to wait for the other processes; None means
        :func:`gluon_syncbn.get_timeout`. If the timeout passes in ``MPI_Init``, which
        cannot be interrupted, this process ends with status 1. If it passes later, a
        RuntimeError is raised.

    Raises
    ------
    RuntimeError
        If mpi4py is missing. If gluon_syncbn was built without MPI, or with another MPI
        than mpi4py. If MPI was initialized without ``MPI_THREAD_MULTIPLE``, or was
        finalized. If MPI started with 1 process, but the launcher's environment has a
        larger number. If :func:`shutdown` was called before. If not all processes call
        `init` within the timeout. You may call `init` again after a timeout.
    mxnet.MXNetError
        If another process fails in this function.
    ValueError
        If `timeout` is not a positive number.

    Examples
    --------
    With ``mpirun -n 2 python program.py``:

    .. code-block:: python

        from gluon_syncbn import distributed

        distributed.init()
        print(f"this is rank {distributed.rank()} of {distributed.size()}")
    """
    seconds = wait_seconds(timeout)
    if world().has_left:
        raise RuntimeError(
            "distributed.init() cannot be called after shutdown(). Start the program "
            "again."
        )
    if world().is_connected:
        return
    comm = _connect(seconds)
    load().gluon_syncbn_distributed_open(_transport(comm))
    set_world(World(comm))
    atexit.register(_leave_at_exit)
    own = _machine()
    machines = allgather(own, "distributed.init", seconds)
    world().of_machine = [n for n, machine in enumerate(machines) if machine == own]
    if world().size == 1 and not os.environ.keys() & set(_SIZE_VARIABLES):
        warn(
            "this process trains alone, because no launcher started it. Run `mpirun -n "
            "2 python PROGRAM` to start two."
        )


def is_initialized() -> bool:
    """Return True if :func:`init` has connected this process.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.is_initialized()
    False
    """
    return world().is_connected


def rank() -> int:
    """Return this process's number, from 0; 0 before :func:`init`.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.rank()
    0
    """
    return world().rank


def size() -> int:
    """Return the number of processes; 1 before :func:`init`.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.size()
    1
    """
    return world().size


def local_rank() -> int:
    """Return this process's number on its machine, from 0; 0 before :func:`init`.

    With one GPU per process, train on ``mx.gpu(local_rank())``.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.local_rank()
    0
    """
    return world().of_machine.index(world().rank)


def local_size() -> int:
    """Return the number of processes on this machine; 1 before :func:`init`.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> distributed.local_size()
    1
    """
    return len(world().of_machine)


def shutdown() -> None:
    """Wait for this rank's pending work, then leave the other ranks.

    A program need not call this function at its end. It may call it more than once,
    before or after Horovod or mpi4py are shut down. Other ranks that wait for this
    rank, and layers that train on this rank afterwards, raise an MXNetError.

    Examples
    --------
    .. code-block:: python

        from gluon_syncbn import distributed

        distributed.init()
        distributed.shutdown()
        assert distributed.size() >= 1
    """
    if world().is_connected and not world().has_left:
        mx.nd.waitall()
        world().has_left = True
        load().gluon_syncbn_distributed_leave()


# ---- MPI.

# A communicator, and MPI's request for it. If a call of `init` times out, the next call
# continues with this request, because all ranks must make the same ones.
_connection: list = []


def _connect(timeout):
    """Return a communicator of all processes that the launcher has started."""
    mpi = _import_mpi4py(timeout)
    number = mpi.COMM_WORLD.Get_size()
    for name in _SIZE_VARIABLES:
        started = os.environ.get(name, "")
        if number == 1 and started.isdigit() and int(started) > 1:
            raise RuntimeError(
                f"{name} is {started}, but MPI started with 1 process, so the "
                "processes would train unsynchronized. Start the program with the "
                f"mpirun of {_mpi_name()}, which mpi4py uses, or unset {name} to run "
                "one process."
            )
    if not _connection:
        _connection.extend(mpi.COMM_WORLD.Idup())
    comm, request = _connection
    deadline = time.monotonic() + timeout
    while not request.Test():  # Wait would occupy a processor
        if time.monotonic() > deadline:
            raise RuntimeError(
                "not every process that the launcher started called "
                f"gluon_syncbn.distributed.init() within {timeout:g} s. Call it in all "
                "processes. To continue the wait in this one, call it again."
            )
        time.sleep(2e-4)
    return comm


def _import_mpi4py(timeout):
    too_late = (
        f"gluon_syncbn.distributed.init(): MPI_Init waited {timeout:g} s for other "
        "processes that the launcher started. Each of them must call init(), or at "
        "least import mpi4py.MPI. This process ends."
    )
    load().gluon_syncbn_exit_after(timeout, too_late)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"distributed.init() needs mpi4py and an MPI library ({error}). Run `pip "
            "install mpi4py mpich`."
        ) from None
    finally:
        load().gluon_syncbn_exit_after(0, "")
    if MPI.Is_finalized():
        raise RuntimeError(
            "MPI was already finalized in this process. Call distributed.init() before "
            "MPI.Finalize()."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "MPI was initialized without MPI_THREAD_MULTIPLE. Do not set "
            "mpi4py.rc.thread_level, and import mpi4py before other packages that "
            "initialize MPI."
        )
    return MPI


def _transport(comm):
    """Return the address of a native transport over a communicator."""
    file = mpi_path()
    if not file.exists():
        raise RuntimeError(
            "gluon_syncbn was built without MPI. Install an MPI with its compiler "
            "wrapper mpicxx (for example `pip install mpich`), then run "
            "`pip install --force-reinstall --no-deps .` in a clone."
        )
    reason = "the library of gluon_syncbn has loaded another MPI"
    try:
        library = ctypes.CDLL(str(file))
        declare(library, file, _SIGNATURES)
        if library.gluon_syncbn_mpi_initialized():
            return library.gluon_syncbn_mpi_transport(comm.py2f())
    except OSError as error:
        reason = str(error)
    raise RuntimeError(
        f"gluon_syncbn must be built with the MPI of mpi4py, {_mpi_name()} "
        f"({reason}). Install mpi4py for the MPI of gluon_syncbn, or run "
        "`pip install --force-reinstall --no-deps .` in a clone."
    )


def _machine():
    from mpi4py import MPI

    return MPI.Get_processor_name()


def _mpi_name():
    from mpi4py import MPI

    version = MPI.Get_library_version()
    return " ".join(version.splitlines()[0].split(",")[0].split())
