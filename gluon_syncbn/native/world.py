"""The processes of the program as native code connects them: state, without advice.

Called by ``distributed``, whose functions document it, and by ``layer``. It must not
know what is exchanged.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Sequence

import mxnet as mx

from . import failures, mpi
from .library import load


class World:
    """The processes that are connected; at first this one alone."""

    def __init__(
        self, rank: int = 0, machines: Sequence = (0,), mpi: Any = None
    ) -> None:
        self.rank, self.size = rank, len(machines)
        self.is_connected = mpi is not None
        self._machines, self._mpi = machines, mpi
        self._pid, self._has_left = os.getpid(), False

    def of_machine(self) -> list[int]:
        """The ranks on this rank's machine."""
        own = self._machines[self.rank]
        return [rank for rank, other in enumerate(self._machines) if other == own]

    def join(self, timeout: float) -> int:
        """Contributes nothing until all have joined; the rank that came furthest."""
        mx.nd.waitall()
        return failures.check(load().gluon_syncbn_distributed_join(timeout))

    def leave(self) -> None:
        """Leaves the other processes, without waiting for them."""
        if self.is_connected and not self._has_left:
            mx.nd.waitall()
            self._has_left = True
            load().gluon_syncbn_distributed_leave()

    def check_open(self) -> None:
        """Raises RuntimeError once this process has left."""
        if self._has_left:
            raise RuntimeError("distributed.init() was called after shutdown()")

    def end(self) -> None:
        """Leaves the other processes when the interpreter exits."""
        if os.getpid() != self._pid:
            return  # in a fork: MPI belongs to the parent
        load().gluon_syncbn_distributed_leave()
        # None of our operators is running after this.
        failures.give_up("the Python interpreter exits")
        # MPI_Finalize waits for all ranks with a busy processor, and never returns if
        # one has died: so all have to have left before.
        own_mpi = self._mpi.gluon_syncbn_mpi_owned()
        patience = failures.get_timeout() if own_mpi else 0.0
        if load().gluon_syncbn_distributed_stop(patience) and own_mpi:
            self._mpi.gluon_syncbn_mpi_finalize()


_world = World()


def world() -> World:
    """The processes that this one is connected with."""
    return _world


def connect(timeout: float) -> None:
    """Connects the processes that ``mpirun`` has started; once."""
    global _world
    mpi_library = mpi.load()
    try:
        size = mpi.initialize(mpi_library)
    except RuntimeError:
        atexit.register(mpi_library.gluon_syncbn_mpi_finalize)
        raise
    transport, machines = mpi.transport(mpi_library, size, timeout)
    rank = load().gluon_syncbn_distributed_open(transport)
    _world = World(rank, machines, mpi_library)
    # It runs before the handler of failures.py, which was registered earlier.
    atexit.register(_world.end)


def wait_seconds(timeout: float | None) -> float:
    """`timeout`, or the default one, as a checked number of seconds."""
    if timeout is None:
        return failures.get_timeout()
    return failures.check_timeout(timeout)
