"""Loads the library that talks over MPI, and starts and ends MPI with it.

Called by ``world.py``. It must not know what is sent.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from .library import Text, declare, mpi_path

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
    "gluon_syncbn_mpi_text": (Text, []),
    "gluon_syncbn_mpi_initialized": (ctypes.c_int, []),
    "gluon_syncbn_mpi_version": (Text, []),
    "gluon_syncbn_mpi_initialize": (ctypes.c_int, []),
    "gluon_syncbn_mpi_transport": (
        ctypes.c_void_p,
        [ctypes.c_double, ctypes.POINTER(ctypes.c_int)],
    ),
    "gluon_syncbn_mpi_owned": (ctypes.c_int, []),
    "gluon_syncbn_mpi_finalize": (None, []),
}


def load() -> ctypes.CDLL:
    """The library as a :class:`ctypes.CDLL`; RuntimeError if it or MPI is missing."""
    file = mpi_path()
    if not file.exists():
        raise RuntimeError(
            "gluon_syncbn was built without MPI: install an MPI with its compiler "
            "wrapper mpicxx (for example `pip install mpich`) and then gluon_syncbn "
            "again with `pip install --force-reinstall '.[mpi]'`"
        )
    try:
        library = _open(file)
    except OSError as error:
        raise RuntimeError(
            "the MPI that gluon_syncbn was built with is not found: wheels need "
            "`pip install mpich`, and a local build the same MPI again "
            f"({error})"
        ) from None
    declare(library, file, _SIGNATURES)
    return library


def _open(file):
    # MPI loads its components, which look for its symbols globally.
    try:
        return ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
    except OSError:
        # Built elsewhere, as by an isolated build: this environment has its own MPI.
        for name in ("libmpi.so.12", "libmpi.so.40"):
            candidate = Path(sys.prefix, "lib", name)
            if candidate.exists():
                ctypes.CDLL(str(candidate), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)


def initialize(library: ctypes.CDLL) -> int:
    """Starts MPI unless it is running; returns the number of processes.

    Raises RuntimeError if MPI cannot be used from several threads, if mpi4py runs on
    another MPI, or if a launcher promised more processes than MPI knows of.
    """
    _refuse_other_mpi(library)
    size = library.gluon_syncbn_mpi_initialize()
    if size < 0:
        raise RuntimeError(library.gluon_syncbn_mpi_text())
    for name in _PROMISES:
        promised = os.environ.get(name, "")
        if size == 1 and promised.isdigit() and int(promised) > 1:
            raise RuntimeError(
                f"{name}={promised} promises {promised} processes, but MPI knows of "
                "this one only, so they would train unsynchronized: start the program "
                f"with the mpirun of {_short(library)}, which gluon_syncbn was built "
                f"with, or unset {name} to run one process alone"
            )
    return size


def _refuse_other_mpi(library):
    mpi4py = sys.modules.get("mpi4py.MPI")
    if mpi4py is None or not mpi4py.Is_initialized():
        return
    if not library.gluon_syncbn_mpi_initialized():
        theirs = mpi4py.Get_library_version().splitlines()[0]
        raise RuntimeError(
            f"mpi4py runs on {theirs.strip()}, but gluon_syncbn was built with "
            f"{_short(library)}: both need the same MPI"
        )


def _short(library):
    version = library.gluon_syncbn_mpi_version()
    return " ".join(version.splitlines()[0].split(",")[0].split())


def transport(library: ctypes.CDLL, size: int, timeout: float) -> tuple[int, list[int]]:
    """The native transport, and for each rank the lowest rank on its machine."""
    machines = (ctypes.c_int * size)()
    pointer = library.gluon_syncbn_mpi_transport(timeout, machines)
    if not pointer:
        raise RuntimeError(library.gluon_syncbn_mpi_text())
    return pointer, list(machines)
