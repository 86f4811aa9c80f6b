"""MPI as mpi4py has initialized it, and the library that sends messages over it.

It must not know what is sent.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np

from .library import declare, load, mpi_path

# With these variables launchers tell each process how many they have started.
_PROMISES = (
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

# All ranks make these together: a communicator, the names of their machines, and the
# request of the step that is under way. MPI goes on with it after a timeout.
_connection: list = []


def connect(timeout: float) -> tuple[Any, list]:
    """A communicator of mpi4py's, and the name of each rank's machine.

    Raises RuntimeError if mpi4py or MPI is missing or cannot be used from several
    threads, if a launcher promised more processes than MPI knows of, or if not all
    ranks come in time; after that it may be called again.
    """
    mpi = _import_mpi4py(timeout)
    size = mpi.COMM_WORLD.Get_size()
    for name in _PROMISES:
        promised = os.environ.get(name, "")
        if size == 1 and promised.isdigit() and int(promised) > 1:
            raise RuntimeError(
                f"{name}={promised} promises {promised} processes, but MPI knows of "
                "this one only, so they would train unsynchronized: start the program "
                f"with the mpirun of {_name_of(mpi)}, which mpi4py uses, or unset "
                f"{name} to run one process alone"
            )
    deadline = time.monotonic() + timeout
    if not _connection:
        comm, request = mpi.COMM_WORLD.Idup()
        _connection.extend([comm, None, request])
    _await_step(deadline, timeout)
    comm, names, _ = _connection
    if names is None:
        own = np.array(mpi.Get_processor_name(), f"S{mpi.MAX_PROCESSOR_NAME}")
        names = np.empty(size, own.dtype)
        request = comm.Iallgather([own, mpi.CHAR], [names, mpi.CHAR])
        _connection[1:] = names, request
        _await_step(deadline, timeout)
    return comm, names.tolist()


def _await_step(deadline, timeout):
    while not _connection[2].Test():  # a blocking call would occupy a processor
        if time.monotonic() > deadline:
            raise RuntimeError(
                "not every process that the launcher started called "
                f"gluon_syncbn.distributed.init() within {timeout:g} s"
            )
        time.sleep(2e-4)


def _import_mpi4py(timeout):
    too_late = (
        f"gluon_syncbn.distributed.init(): MPI_Init waited {timeout:g} s for other "
        "processes that the launcher started. Call init() in each of them, or import "
        "mpi4py.MPI. This process ends."
    )
    load().gluon_syncbn_exit_after(timeout, too_late)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "several processes need mpi4py and an MPI: install gluon_syncbn with "
            f"`pip install --force-reinstall '.[mpi]'` ({error})"
        ) from None
    finally:
        load().gluon_syncbn_exit_after(0, "")
    if MPI.Is_finalized():
        raise RuntimeError("MPI was finalized already in this process")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, which is needed here: "
            "leave mpi4py.rc.thread_level as it is, or import mpi4py before others "
            "initialize MPI"
        )
    return MPI


def transport(comm: Any) -> int:
    """The native transport over a communicator of mpi4py's.

    Raises RuntimeError if gluon_syncbn was built without MPI, or with another one.
    """
    from mpi4py import MPI

    file = mpi_path()
    if not file.exists():
        raise RuntimeError(
            "gluon_syncbn was built without MPI: install an MPI with its compiler "
            "wrapper mpicxx (for example `pip install mpich`) and then gluon_syncbn "
            "again with `pip install --force-reinstall '.[mpi]'`"
        )
    reason = "it has loaded another one"
    try:
        library = _open(file)
        declare(library, file, _SIGNATURES)
        if library.gluon_syncbn_mpi_initialized():
            return library.gluon_syncbn_mpi_transport(comm.py2f())
    except OSError as error:
        reason = str(error)
    raise RuntimeError(
        f"mpi4py runs on {_name_of(MPI)}, but gluon_syncbn was built with another "
        "MPI: install mpi4py for that one, or gluon_syncbn again with `pip install "
        f"--force-reinstall '.[mpi]'` ({reason})"
    )


def _open(file):
    return ctypes.CDLL(str(file))


def _name_of(mpi):
    version = mpi.Get_library_version()
    return " ".join(version.splitlines()[0].split(",")[0].split())
