"""Turns: one thread at a time calls several devices, or recovers from a failure."""

from __future__ import annotations

import collections
import os
import threading
from contextlib import contextmanager, suppress
from typing import Any, Iterator, Sequence

from .interrupts import DeferredSignals, watch_ctrl_c
from .timeouts import lock_timeout

_EXIT_SECONDS = 10  # how long the exit waits for the map of another thread


class Here(threading.local):
    """State of the calling thread."""

    contexts: Sequence = ()  # the contexts of the innermost `Devices.map`

    def __reduce__(self) -> str:  # a deep copy of `here` is `here` itself
        return "here"


here = Here()
_locks: Any = collections.defaultdict(threading.RLock)  # one per process


@contextmanager
def turn() -> Iterator[tuple[DeferredSignals, bool]]:
    """Defer signals, and wait until no other thread is in `Devices.map` or `recover`.

    A recovery during a map would cancel only half of its work. Yield the section of
    deferred signals, and False if the wait has timed out.
    """
    watch_ctrl_c()
    with DeferredSignals() as section:
        if here.contexts:  # the outermost map has the turn
            yield section, True
            return
        lock = _locks[os.getpid()]
        try:
            has_turn = lock.acquire(False) or section.wait(
                0, lock.acquire, True, lock_timeout()
            )
            yield section, has_turn
        finally:
            with suppress(RuntimeError):  # the wait timed out or was interrupted
                lock.release()


def take_last_turn() -> None:
    """Wait for the map of another thread, after which no thread gets a turn."""
    _locks[os.getpid()].acquire(timeout=min(lock_timeout(), _EXIT_SECONDS))
