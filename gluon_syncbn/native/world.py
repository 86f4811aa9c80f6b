"""The processes of the program as native code connects them: state, without advice.

It must not know what is exchanged.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Sequence

import mxnet as mx

from . import failures, mpi
from .library import load


class World:
    """The processes that are connected; at first this one alone.

    `comm` is their communicator of mpi4py's, in whose collectives a rank that is
    missing is waited for without end, so they meet first, see ``distributed/meeting``.
    """

    def __init__(self, comm: Any = None, machines: Sequence = ("this one",)) -> None:
        self.comm, self.size = comm, len(machines)
        self.rank = 0 if comm is None else comm.rank
        own = machines[self.rank]
        self.of_machine = [rank for rank in range(self.size) if machines[rank] == own]
        self._pid, self._has_left = os.getpid(), False

    @property
    def is_connected(self) -> bool:
        return self.comm is not None

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
        # mpi4py finalizes MPI after all exit handlers, which waits for all ranks with a
        # busy processor.
        load().gluon_syncbn_distributed_stop(failures.get_timeout())


_world = World()


def world() -> World:
    """The processes that this one is connected with."""
    return _world


def connect(timeout: float) -> None:
    """Connects the processes that ``mpirun`` has started; once."""
    global _world
    comm, machines = mpi.connect(timeout)
    load().gluon_syncbn_distributed_open(mpi.transport(comm))
    _world = World(comm, machines)
    # It runs before the handler of failures.py, which was registered earlier.
    atexit.register(_world.end)


def wait_seconds(timeout: float | None) -> float:
    """`timeout`, or the default one, as a checked number of seconds."""
    if timeout is None:
        return failures.get_timeout()
    return failures.check_timeout(timeout)
