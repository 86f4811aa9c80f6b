"""Sections in which signal handlers wait, because an exception of theirs would do harm.

An exception between the calls for two contexts leaves one context without the work that
the other one waits for. An exception while another thread calls MXNet crashes MXNet. An
exception inside of an update leaves half a step.
"""

from __future__ import annotations

import inspect
import math
import signal
import threading
from typing import Any, Callable

# The C functions behind Python's: converting to enums takes 170 us for all signals.
_handler_of = inspect.unwrap(signal.getsignal)
_set_handler = inspect.unwrap(signal.signal)
ALL_WAIT = math.inf, math.inf


class DeferredSignals:
    """A section that calls the program's signal handlers when it ends, or in `wait`.

    Python runs handlers in the main thread only, so a section of another thread changes
    nothing. A nested section is the outer one.
    """

    _open: DeferredSignals | None = None

    def __init__(self) -> None:
        self._former: dict = {}
        self._noted: list[tuple] = []
        # The numbers of SIGINTs, and of other signals, that wait for the section's end.
        self.limits: tuple[float, float] = ALL_WAIT

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        if DeferredSignals._open is not None:
            return DeferredSignals._open
        try:
            for number in range(1, signal.NSIG):
                handler = _handler_of(number)
                if callable(handler):
                    # An earlier section may have left its replacement.
                    handler = getattr(handler, "handler", handler)
                    self._former[number] = handler
                    _set_handler(number, _Noting(self, handler))
            DeferredSignals._open = self  # no later statement raises
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        if DeferredSignals._open is not self:
            return
        try:
            DeferredSignals._open = None  # later signals call their handlers at once
            self._put_back()
        finally:
            try:
                self._put_back()  # a handler may have raised during the first attempt
            finally:
                if self._noted:
                    _call_all(self._noted)

    def _put_back(self):
        for number, handler in self._former.items():
            _set_handler(number, handler)

    def wait(self, patience: int, function: Callable, *arguments: Any) -> Any:
        """Return the result of a function that a signal may interrupt.

        The first `patience` SIGINTs wait for the section's end; later ones, and other
        signals, interrupt at once. The function may have ended when its caller gets the
        exception.
        """
        former = self.limits
        try:
            self.limits = patience, 0
            if self._noted:
                self._call_due()
            return function(*arguments)
        finally:
            self.limits = former

    def handle(self, number: int, handler: Callable, frame: Any) -> None:
        """Call a signal's handler, now or later."""
        if DeferredSignals._open is self:
            self._noted.append((number, handler, frame))
            self._call_due()
        else:
            handler(number, frame)

    def _call_due(self):
        interrupts = [one for one in self._noted if one[0] == signal.SIGINT]
        others = [one for one in self._noted if one[0] != signal.SIGINT]
        due, kept = [], []
        for signals, limit in zip((interrupts, others), self.limits):
            (due if len(signals) > limit else kept).extend(signals)
        if due:
            # A second exception must not interrupt what the first one unwinds.
            limits, self.limits, self._noted = self.limits, ALL_WAIT, kept
            _call_all(due)
            self.limits = limits


class _Noting:
    """Replacement for a handler, which calls the handler outside of its section."""

    def __init__(self, section, handler):
        self._section, self.handler = section, handler

    def __call__(self, number, frame):
        self._section.handle(number, self.handler, frame)


def _call_all(noted):
    """Call the handlers in order, even if one raises."""
    if noted:
        (number, handler, frame), *others = noted
        try:
            handler(number, frame)
        finally:
            _call_all(others)
