"""The processes of the program, whose layers exchange messages.

`distributed/connection.py` connects them.
"""

from __future__ import annotations

from typing import Any, Sequence


class World:
    """The connected processes; before `init` only this one."""

    def __init__(self, comm: Any = None, machines: Sequence = ("this one",)) -> None:
        self.comm, self.size = comm, len(machines)  # comm is mpi4py's
        self.is_connected, self.has_left = comm is not None, False
        self.rank = 0 if comm is None else comm.rank
        own = machines[self.rank]
        self.of_machine = [rank for rank in range(self.size) if machines[rank] == own]


_world = World()


def world() -> World:
    return _world


def set_world(connected: World) -> None:
    global _world
    _world = connected
