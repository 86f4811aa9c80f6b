"""The processes of the program, whose layers exchange messages.

`distributed/connection.py` connects them.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np

from .library import load
from .timeouts import wait_seconds


class World:
    """The connected processes; before `init` only this one."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm  # mpi4py made it
        self.is_connected, self.has_left = comm is not None, False
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        self.of_machine = [self.rank]  # the ranks on this machine


_world = World()


def world() -> World:
    return _world


def set_world(connected: World) -> None:
    global _world
    _world = connected


def allgather(value: Any, name: str, timeout: float | None = None) -> list:
    """Return the values of all processes in the order of ranks, sent as JSON.

    The n-th call with a name matches the n-th call with this name on the other ranks.
    Raise MXNetError, which names the ranks, if a rank does not call it within the
    timeout.
    """
    if _world.size == 1:
        return [value]
    # Exchanges carry float64 numbers, so each rank's line of text is padded to these.
    text = json.dumps(value).encode() + b"\n"
    own = np.frombuffer(text.ljust(-(-len(text) // 8) * 8), np.float64)
    found, size = ctypes.c_void_p(), ctypes.c_int64()
    results = wait_seconds(timeout), ctypes.byref(found), ctypes.byref(size)
    load().gluon_syncbn_distributed_gather(name, own.ctypes.data, own.size, *results)
    *lines, _padding = ctypes.string_at(found, 8 * size.value).split(b"\n")
    return list(map(json.loads, lines))
