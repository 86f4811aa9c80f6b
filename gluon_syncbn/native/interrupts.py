"""Defers Ctrl-C to a moment when it does no harm.

An exception between the calls for two contexts would leave one without the work that
the others wait for, and one while another thread calls MXNet crashes it. It must not
know what is called.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def deferred_interrupt(all_of_them: bool = False) -> Iterator[None]:
    """In the main thread, the first SIGINT waits for the end of the ``with`` block.

    A second one is handled at once, unless `all_of_them` wait. Each calls the program's
    own handler; without one in Python, nothing changes.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    noted = []

    def note(signum, frame):
        noted.append((signum, frame))
        if len(noted) > 1 and not all_of_them:
            handler(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(noted) == 1 or noted and all_of_them:
            handler(*noted[0])
