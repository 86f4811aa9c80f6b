"""Timeouts that end a wait, and the recovery of a process after an error.

It must not know what a layer computes.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any, Sequence

import mxnet as mx

from ..arguments import as_real, check_text, short_repr
from . import ctrl_c
from .interrupts import DeferredSignals
from .library import load
from .program import tell_where

_VARIABLE = "GLUON_SYNCBN_TIMEOUT"
_MOST_ERRORS = 10_000  # in flight at once
latest_recovery = 0, 0, ""  # its number, its thread, and its reason


class Here(threading.local):
    """State of the calling thread."""

    contexts: Sequence = ()  # those of the innermost map that this thread works for
    recovery = -1  # the number of the latest one at this thread's latest `check_thread`
    was_told = False  # by that, of another thread's recovery

    def __reduce__(self) -> str:  # a copy of a net has the same threads
        return "here"


here = Here()
_turns: Any = collections.defaultdict(threading.RLock)  # by process


def turn() -> Any:
    """Return the lock of the thread that calls MXNet for several contexts, or recovers.

    Between a step's work for two contexts another thread must not give it up.
    """
    return _turns[os.getpid()]


function_contexts = set()  # contexts that run our autograd.Functions


def check_timeout(seconds: object, name: str = "timeout") -> float:
    """`seconds` as a float; raises ValueError unless it is a positive number."""
    value = as_real(seconds)
    if not value > 0:
        raise ValueError(
            f"{name} is a positive number of seconds, or inf for never, but got "
            f"{short_repr(seconds)}"
        )
    return value


def set_timeout(seconds: float) -> None:
    """Sets how long a device waits for the others, where a layer sets no timeout.

    The environment variable ``GLUON_SYNCBN_TIMEOUT`` sets the initial value; without it
    that is 300 s.

    Parameters
    ----------
    seconds : float
        Greater than 0. Counts from a device's own arrival at a layer. ``inf``, and all
        from 1e9 (31 years) on, mean that a wait never times out.

    Raises
    ------
    ValueError
        If `seconds` is no positive number.

    Examples
    --------
    >>> import gluon_syncbn
    >>> former = gluon_syncbn.get_timeout()
    >>> gluon_syncbn.set_timeout(60)
    >>> gluon_syncbn.get_timeout()
    60.0
    >>> gluon_syncbn.set_timeout(former)
    """
    load().gluon_syncbn_set_timeout(check_timeout(seconds, "seconds"))


def get_timeout() -> float:
    """The timeout in seconds that :func:`set_timeout` sets.

    Examples
    --------
    >>> import gluon_syncbn
    >>> gluon_syncbn.get_timeout() > 0
    True
    """
    return load().gluon_syncbn_timeout()


def bound() -> float:
    """Return the timeout in seconds, as Python's locks take it."""
    return min(load().gluon_syncbn_timeout(), threading.TIMEOUT_MAX)


def failure() -> str:
    """The error that a layer has failed with, as text; empty if nothing has failed."""
    return load().gluon_syncbn_failure()


def check_thread() -> None:
    """MXNetError if a layer has failed, or the calling thread's work was given up."""
    failed = failure()
    if failed:
        raise mx.MXNetError(failed)
    number, by, reason = latest_recovery
    seen, here.recovery = here.recovery, number
    here.was_told = seen not in (-1, number) and by != threading.get_ident()
    if here.was_told:
        raise mx.MXNetError(
            "what this thread had in flight was given up by another one, which called "
            f"gluon_syncbn.recover ({reason}); its results are undefined: repeat the "
            "step without recover()"
        )


def check(code: int) -> int:
    """A native function's result; its error, as one of MXNet's, if negative."""
    if code < 0:
        raise mx.MXNetError(load().gluon_syncbn_last_error())
    return code


def end_waits(reason: str) -> None:
    """Ends all waits for devices with this text, now and until :func:`recover`.

    The other processes of :mod:`gluon_syncbn.distributed` get it too, and for good.
    """
    load().gluon_syncbn_fail_all(reason, True)


def recover(reason: str = "gluon_syncbn.recover() was called") -> None:
    """Gives up the work in flight and makes all layers ready for the next step.

    To be called after an :class:`mxnet.MXNetError` of a layer was caught: it ends the
    waits of other layers, waits until MXNet is idle, drops the errors that arrays still
    carry, and restarts the numbering of the layers' calls.

    A step of a :class:`mxnet.gluon.Trainer` that has a layer's parameters waits for its
    gradients, and raises their error before anything is updated: parameters, the
    optimizer's states and counts have afterwards the same bits as before the step.
    Running statistics may have the failed batch's share, because forward updates them.
    Gradients are undefined: with ``grad_req="add"`` set them to zero.

    Threads that train other nets get an error at their next :meth:`Devices.map`,
    because their work in flight is given up too. They repeat their step; the call of
    one that calls `recover` after that error has no effect.

    Parameters
    ----------
    reason : str
        The words that those threads' errors quote.

    Raises
    ------
    mxnet.MXNetError
        If an exchange with other processes has failed: a failure may reach one rank
        before its step is whole and another after it, so nobody knows the batch that
        all would go on with. The program has to be started again, from its checkpoint.

    Examples
    --------
    A layer on two contexts of which one gets no shard:

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
    check_text("reason", reason)
    was_told, here.was_told = here.was_told, False
    if was_told and not failure():
        return
    with DeferredSignals() as section:
        lock = turn()
        try:
            # Another thread's function may wait in vain, and have the turn.
            load().gluon_syncbn_fail_all(reason, False)
            if not here.contexts:
                section.wait(0, lock.acquire, True, bound())
            give_up(reason)
        finally:
            with suppress(RuntimeError):  # this thread has not got its turn
                lock.release()
    if failure():  # the processes'
        raise mx.MXNetError(
            "recover() cannot bring several processes together again: start the "
            f"program again, from its checkpoint. It failed with: {failure()}"
        )


def give_up(reason: str) -> None:
    """Recovers this process as `recover` does, whatever the others do."""
    global latest_recovery
    latest_recovery = latest_recovery[0] + 1, threading.get_ident(), reason
    load().gluon_syncbn_fail_all(reason, False)
    # MXNet drops each error that it throws; without an engine it throws always.
    for _ in range(_MOST_ERRORS):
        try:
            mx.nd.waitall()
            break
        except mx.MXNetError:
            pass
    load().gluon_syncbn_reset_all()


def _finish_work():
    """Ends all work for which MXNet's threads would call Python at exit."""
    tell_where(False)
    give_up("the Python interpreter exits")
    # MXNet counts an operator as done before it deletes it. To delete one of an
    # autograd.Function that was skipped after an error, it calls Python, and a thread
    # that does so while the interpreter ends aborts the process. A context's thread has
    # deleted one operator before it runs the next.
    for context in function_contexts:
        mx.nd.zeros((1,), ctx=context).wait_to_read()


@lru_cache(maxsize=None)
def watch_process() -> None:
    """Ends all work before a fork and at exit; called with the first layer."""
    # ctypes releases the GIL, so other threads queue what the work in flight waits for.
    os.register_at_fork(before=load().gluon_syncbn_wait_before_fork)
    # MXNet's own exit handler, which runs after this one, stops the threads of custom
    # operators before it waits for all work: it would wait forever for our operators.
    atexit.register(_finish_work)
    tell_where(True)
    ctrl_c.watch()


def _set_timeout_from_environment():
    value = os.environ.get(_VARIABLE)
    try:
        if value is not None:
            set_timeout(float(value))
    except ValueError:
        check_timeout(value, _VARIABLE)  # it refuses a text, and names the variable


load()  # registers the operator, so that symbols from files find it
_set_timeout_from_environment()
