"""Signals: handlers that are called later, and waits that Ctrl-C ends.

A handler that raises an exception, like the handler of Ctrl-C, could end a trainer's
step in the middle, or a call for several contexts after the first one, which then waits
for the others. It could also let two threads call MXNet at once, which crashes MXNet.
"""

from __future__ import annotations

import _signal  # noqa: PLC2701
import fcntl
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Callable

from .library import load

# The C functions, because Python's take 170 us to convert all signals to enums.
_handler_of, _set_handler = _signal.getsignal, _signal.signal


class DeferredSignals:
    """A section that calls the program's signal handlers at its end, or in `wait`.

    A section is a ``with`` block. Inside another section, `with` returns the outer one.
    Python runs handlers in the main thread only, so other threads' sections do nothing.
    """

    _open: DeferredSignals | None = None

    def __init__(self) -> None:
        self._handlers: dict = {}  # the program's handler of each signal
        self._deferred: list[tuple] = []  # arguments of handlers
        self._patience: int | None = None  # argument of `wait`, None outside

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        if DeferredSignals._open is None:
            try:
                for number in range(1, signal.NSIG):
                    handler = _handler_of(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _set_handler(number, self._handle)
                DeferredSignals._open = self  # `_handle` defers now
            except BaseException:
                self._restore_handlers()
                raise
        return DeferredSignals._open

    def __exit__(self, *exception: Any) -> None:
        if DeferredSignals._open is self:
            try:
                DeferredSignals._open = None  # later signals call handlers at once
                self._restore_handlers()
            except BaseException:  # raised by a handler
                self._restore_handlers()
                raise
            finally:
                if self._deferred:
                    self._for_each_deferred(self._call)

    def _restore_handlers(self):
        for number, handler in self._handlers.items():
            _set_handler(number, handler)

    def wait(self, patience: int, function: Callable, *arguments: Any) -> Any:
        """Return the result of a function that a signal may interrupt.

        Up to `patience` SIGINTs are deferred to the section's end. After one more
        SIGINT the handler is called for each. Other signals are not deferred.
        """
        try:
            self._patience = patience
            if self._deferred:
                self._for_each_deferred(self._handle)
            return function(*arguments)
        finally:
            self._patience = None

    def _handle(self, number, frame):
        is_waiting = self._patience is not None
        if DeferredSignals._open is not self or is_waiting and number != signal.SIGINT:
            self._call(number, frame)
            return
        self._deferred.append((number, frame))
        if is_waiting and len(self._deferred) > self._patience:
            self._for_each_deferred(self._call)

    def _call(self, number, frame):
        self._handlers[number](number, frame)

    def _for_each_deferred(self, function):
        """Call a function with each deferred signal, even if one call raises."""
        deferred, self._deferred = self._deferred, []
        with ExitStack() as stack:
            for arguments in reversed(deferred):
                stack.callback(function, *arguments)


# A child process may lack the thread whose section was open at the fork.
os.register_at_fork(after_in_child=partial(setattr, DeferredSignals, "_open", None))


# ---- Ctrl-C, and SIGUSR1 with GLUON_SYNCBN_STATUS=1.

_SHOWS_STATUS = os.environ.get("GLUON_SYNCBN_STATUS") == "1"
_SECONDS = 1.5  # how long a wait may last after Ctrl-C
_listener: Any = None  # the thread, or the process in which another library listens
_wakeup = -1  # the descriptor that Python writes to


def watch_ctrl_c() -> None:
    """Start a thread that ends the wait of a layer after Ctrl-C, if none runs.

    Python calls no handler while the main thread waits inside MXNet for a layer. But
    Python immediately writes the signal's number to the wakeup descriptor, which this
    thread reads. If another library uses that descriptor, no thread is started. Only
    the main thread can set it, so layers and maps call this function again.
    """
    global _listener, _wakeup
    if threading.current_thread() is not threading.main_thread():
        return
    if _listener == os.getpid() or getattr(_listener, "is_alive", bool)():
        return
    if not _unset_descriptor():
        _listener = os.getpid()
        return
    read, _wakeup = map(_renumbered, os.pipe())
    os.set_blocking(_wakeup, False)
    signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    if _SHOWS_STATUS:  # Python reports only signals that have a handler
        signal.signal(signal.SIGUSR1, lambda *_: None)
    _listener = threading.Thread(
        target=_listen, args=(read,), name="gluon_syncbn-ctrl-c", daemon=True
    )
    _listener.start()


def _renumbered(descriptor):
    """Give a descriptor a number that a file of the program hardly gets.

    If the program closes all descriptors (`os.closerange`), its next files get the
    lowest numbers, and Python would write the signals' numbers into one of them.
    """
    with suppress(OSError):  # the process may have fewer descriptors
        renumbered = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1000)
        os.close(descriptor)
        return renumbered
    return descriptor


def _unset_descriptor():
    """Unset the wakeup descriptor, or return False if it is another library's."""
    found = signal.set_wakeup_fd(-1)
    is_own = found in (-1, _wakeup)
    if not is_own:
        signal.set_wakeup_fd(found)
    return is_own


os.register_at_fork(after_in_child=_unset_descriptor)  # a child lacks the thread


def _listen(descriptor):
    while True:
        try:
            numbers = os.read(descriptor, 4096)
        except OSError:
            numbers = b""
        if not numbers:  # the program has closed the descriptors
            return
        if _SHOWS_STATUS and signal.SIGUSR1 in numbers:
            print(load().gluon_syncbn_status(), file=sys.stderr, flush=True)
        if signal.SIGINT not in numbers:
            continue
        position = _position()
        time.sleep(_SECONDS)
        if position == _position() and load().gluon_syncbn_longest_wait() > _SECONDS:
            reason = (
                "Ctrl-C ended the wait. Before the next step call "
                "gluon_syncbn.recover()."
            )
            load().gluon_syncbn_fail_all(reason, True)


def _position():
    """Return the current frame and operation of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident)  # noqa: SLF001
    return id(frame), frame and frame.f_lasti
