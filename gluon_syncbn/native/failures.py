"""Timeouts, recovery after an error, and lines of the user's program in errors."""

from __future__ import annotations

import atexit
import collections
import ctypes
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Iterator, Sequence

import mxnet as mx

from ..arguments import as_real, check_type, short_repr
from ..mxnet_private.graphs import release_owners
from .interrupts import DeferredSignals, watch_ctrl_c
from .library import load

_VARIABLE = "GLUON_SYNCBN_TIMEOUT"
_EXIT_SECONDS = 10  # how long the exit waits for the map of another thread
latest_recovery = 0, 0, ""  # its number (0 before the first), thread and reason


class Here(threading.local):
    """State of the calling thread."""

    contexts: Sequence = ()  # the contexts of the innermost `Devices.map`
    recovery = -1  # the number of recoveries when `raise_pending` last ran
    was_cancelled = False  # True if another thread cancelled this thread's work

    def __reduce__(self) -> str:  # a deep copy of `here` is `here` itself
        return "here"


here = Here()
_turns: Any = collections.defaultdict(threading.RLock)  # one per process


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
        lock = _turns[os.getpid()]
        try:
            has_turn = lock.acquire(False) or section.wait(
                0, lock.acquire, True, lock_timeout()
            )
            yield section, has_turn
        finally:
            with suppress(RuntimeError):  # the wait timed out or was interrupted
                lock.release()


# ---- Timeouts.


def check_timeout(seconds: object, name: str = "timeout") -> float:
    value = as_real(seconds)
    if not value > 0:
        raise ValueError(
            f"{name} must be a positive number of seconds, or inf for no timeout, got "
            f"{short_repr(seconds)}"
        )
    return value


def set_timeout(seconds: float) -> None:
    """Set how long a device waits for the others, unless its layer has a `timeout`.

    The environment variable ``GLUON_SYNCBN_TIMEOUT`` sets the initial value. Its
    default is 300 s.

    Parameters
    ----------
    seconds : float
        A positive number, counted from a device's own arrival at a layer. With ``inf``,
        and numbers from 1e9 (31 years) on, a wait never times out.

    Raises
    ------
    ValueError
        If `seconds` is not a positive number.

    Examples
    --------
    >>> import gluon_syncbn
    >>> previous = gluon_syncbn.get_timeout()
    >>> gluon_syncbn.set_timeout(60)
    >>> gluon_syncbn.get_timeout()
    60.0
    >>> gluon_syncbn.set_timeout(previous)
    """
    load().gluon_syncbn_set_timeout(check_timeout(seconds, "seconds"))


def get_timeout() -> float:
    """Return the timeout in seconds that :func:`set_timeout` sets.

    Examples
    --------
    >>> import gluon_syncbn
    >>> gluon_syncbn.get_timeout() > 0
    True
    """
    return load().gluon_syncbn_timeout()


def lock_timeout() -> float:
    return min(load().gluon_syncbn_timeout(), threading.TIMEOUT_MAX)


# ---- Failures and recovery.


def failure() -> str:
    """Return the error with which a layer has failed, or an empty text."""
    return load().gluon_syncbn_failure()


def raise_pending() -> None:
    """Raise MXNetError if a layer has failed or another thread called `recover`."""
    release_owners()
    failed = failure()
    if failed:
        raise mx.MXNetError(failed)
    number, by, reason = latest_recovery
    seen, here.recovery = here.recovery, number
    here.was_cancelled = seen not in (-1, number) and by != threading.get_ident()
    if here.was_cancelled:
        raise mx.MXNetError(
            "pending work of this thread was cancelled by gluon_syncbn.recover() in "
            f"another thread ({reason}). Discard its results, and repeat the step "
            "without recover()."
        )


def end_waits(reason: str, tell_ranks: bool = True) -> None:
    """Raise `reason` in all waits for devices, also in later ones until `recover`.

    Other ranks get the error if `tell_ranks`, or if an exchange here waits for them.
    """
    load().gluon_syncbn_fail_all(reason, tell_ranks)


def recover(reason: str = "gluon_syncbn.recover() was called") -> None:
    """Cancel pending work and make all layers ready for the next step.

    Call it after you have caught an :class:`mxnet.MXNetError` of a layer. It ends the
    waits of other layers, waits until MXNet is idle, drops the errors that arrays still
    have, and lets layers run on other devices than before.

    A step of a :class:`mxnet.gluon.Trainer` with a layer's parameters waits for its
    gradients and raises their error before it updates anything. So the parameters, the
    optimizer's states and its counts keep the bits from before the step. Running
    statistics may contain the failed batch, because forward updates them. Gradients are
    undefined: with ``grad_req="add"`` set them to zero.

    Pending work of threads that train other nets is also cancelled. They get an error
    in their next :meth:`Devices.map` and must repeat their step. If they call `recover`
    after that error, the call has no effect.

    Parameters
    ----------
    reason : str
        A text that the errors of those threads quote.

    Raises
    ------
    mxnet.MXNetError
        If an exchange with other processes has failed. Then some ranks may have
        completed the step and others not, so ranks cannot agree on the next batch.
        Start the program again, from its checkpoint.

    Examples
    --------
    A layer on two contexts, one of which gets no shard:

    >>> import gluon_syncbn
    >>> import mxnet as mx
    >>> layer = gluon_syncbn.SyncBatchNorm(num_devices=2, timeout=0.1)
    >>> layer.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> with mx.autograd.train_mode():
    ...     y = layer(mx.nd.ones((2, 3), ctx=mx.cpu(0)))
    >>> try:
    ...     y.wait_to_read()
    ... except mx.MXNetError as error:
    ...     print("Arrived: cpu(0)" in str(error), "Missing: cpu(1)" in str(error))
    ...     gluon_syncbn.recover()
    True True
    """
    check_type("reason", reason, str, "a str")
    was_cancelled, here.was_cancelled = here.was_cancelled, False
    if was_cancelled and not failure():
        return
    load().gluon_syncbn_fail_all(reason, False)  # so a map in another thread ends
    with turn():
        give_up(reason)
    if failure():  # an exchange with other processes has failed
        raise mx.MXNetError(
            "recover() cannot restore several processes. You must start the program "
            f"again, from its checkpoint. It failed with: {failure()}"
        )


def give_up(reason: str) -> None:
    """Cancel all pending work of this process."""
    global latest_recovery
    latest_recovery = latest_recovery[0] + 1, threading.get_ident(), reason
    _cancel(reason)
    load().gluon_syncbn_reset_all()


def _cancel(reason):
    load().gluon_syncbn_fail_all(reason, False)
    # waitall may raise again for other errors. The limit prevents an endless loop.
    for _ in range(10_000):
        try:
            mx.nd.waitall()
            break
        except mx.MXNetError:
            pass


def finish_work() -> None:
    """Cancel pending work before the Python interpreter ends, for good.

    Daemon threads still run. The failure remains, and no other thread gets a turn, so
    they queue no operators that nothing would run.
    """
    load().gluon_syncbn_set_locator(None)
    reason = "the Python interpreter exits"
    load().gluon_syncbn_fail_all(reason, False)  # so a map in another thread ends
    _turns[os.getpid()].acquire(timeout=min(lock_timeout(), _EXIT_SECONDS))
    _cancel(reason)


def watch_process() -> None:
    """Register handlers of forks, of the process's exit and of Ctrl-C."""
    _register_handlers()
    watch_ctrl_c()


@lru_cache(maxsize=None)
def _register_handlers():
    # The handler waits without the GIL (ctypes releases it), so other threads can run.
    os.register_at_fork(before=load().gluon_syncbn_wait_before_fork)
    # MXNet's own exit handler runs after this one. It stops the threads of custom
    # operators, then waits for all work, so it would wait for our operators forever.
    atexit.register(finish_work)
    load().gluon_syncbn_set_locator(_locate)


# ---- The user's lines, which timeouts and warnings show.

_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(mx.__file__),
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
    )
)


def warn(text: str) -> None:
    """Issue a warning for the user's line that has called this package."""
    frame, level = sys._getframe(), 1  # noqa: SLF001
    users = _users_frame(frame)
    while frame is not users and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


@ctypes.CFUNCTYPE(None)
def _locate():
    """Report to native code which line of the user's program each thread executes."""
    with suppress(BaseException):  # after an error nothing is reported
        frames, main = sys._current_frames(), threading.main_thread()  # noqa: SLF001
        lines = ""
        for thread in threading.enumerate():
            place = _describe(_users_frame(frames.get(thread.ident or 0)))
            name = "The program" if thread is main else f"Its thread '{thread.name}'"
            lines += f"\n{name} stands at {place}" if place else ""
        load().gluon_syncbn_tell_where(lines)


def _describe(frame):
    if frame is None:
        return ""
    (line,) = traceback.extract_stack(frame, limit=1)
    path, folder = line.filename, os.path.join(os.getcwd(), "")
    inside = "" if line.name == "<module>" else f", in {line.name}"
    source = f": {line.line}" if line.line else ""
    path = path[len(folder) :] if path.startswith(folder) else path
    return f"{path}:{line.lineno}{inside}{source}"


def _users_frame(frame):
    while frame is not None:
        file = frame.f_code.co_filename
        is_main = frame.f_globals.get("__name__") == "__main__"
        # MXNet generates its operators' functions from text, with the file "<string>".
        is_generated = file.startswith("<") and not is_main
        if not (is_generated or os.path.abspath(file).startswith(_LIBRARIES)):
            break
        frame = frame.f_back
    return frame


# ---- When this module is imported.

load()  # registers the operator, so that symbols from files find it
_seconds = os.environ.get(_VARIABLE)
if _seconds is not None:
    try:
        set_timeout(float(_seconds))
    except ValueError:
        check_timeout(_seconds, _VARIABLE)  # raises an error with the variable's name
