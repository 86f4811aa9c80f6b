"""A thread that ends the wait of a layer after Ctrl-C.

Python handles signals between two operations of the main thread. The main thread may be
inside of MXNet, where it waits for an array that waits for a layer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from .library import load

_SECONDS = 1.5


def watch() -> None:
    """Start the thread, unless another library has the wakeup descriptor.

    Python writes each signal's number to this descriptor at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    former = signal.set_wakeup_fd(-1)
    if former != -1:
        signal.set_wakeup_fd(former)
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(
        target=_listen, args=(read,), name="gluon_syncbn-ctrl-c", daemon=True
    ).start()

    def in_child():
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, write):
            signal.set_wakeup_fd(found)

    os.register_at_fork(after_in_child=in_child)  # a child has no such thread


def _listen(descriptor):
    while True:
        if signal.SIGINT not in os.read(descriptor, 4096):
            continue
        place = _place()
        time.sleep(_SECONDS)
        if place == _place() and load().gluon_syncbn_longest_wait() > _SECONDS:
            reason = (
                "Ctrl-C ended the wait. Before the next step call "
                "gluon_syncbn.recover()."
            )
            load().gluon_syncbn_fail_all(reason, True)


def _place():
    """Return the current frame and operation of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident)  # noqa: SLF001
    return id(frame), frame and frame.f_lasti
