"""Failures of layers, recovery from them, and the end of the process."""

from __future__ import annotations

import atexit
import os
import threading
from functools import lru_cache

import mxnet as mx

from ..arguments import check_type
from ..mxnet_private.tape import release_owners
from .interrupts import watch_ctrl_c
from .library import load
from .program_lines import locate
from .turns import take_last_turn, turn

latest_recovery = 0, 0, ""  # its number (0 before the first), thread and reason


class _Thread(threading.local):
    recovery = -1  # the number of recoveries when `raise_pending` last ran
    was_cancelled = False  # True if another thread cancelled this thread's work


_thread = _Thread()


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
    seen, _thread.recovery = _thread.recovery, number
    _thread.was_cancelled = seen not in (-1, number) and by != threading.get_ident()
    if _thread.was_cancelled:
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
    was_cancelled, _thread.was_cancelled = _thread.was_cancelled, False
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
    take_last_turn()
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
    load().gluon_syncbn_set_locator(locate)
