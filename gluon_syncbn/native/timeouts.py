"""Timeouts: how long devices and processes wait for each other."""

from __future__ import annotations

import os
import threading

from ..arguments import as_real, short_repr
from .library import load

_VARIABLE = "GLUON_SYNCBN_TIMEOUT"


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


def wait_seconds(timeout: float | None) -> float:
    """Return a checked timeout in seconds; None means the default timeout."""
    if timeout is None:
        return get_timeout()
    return check_timeout(timeout)


_seconds = os.environ.get(_VARIABLE)
if _seconds is not None:
    try:
        set_timeout(float(_seconds))
    except ValueError:
        check_timeout(_seconds, _VARIABLE)  # raises an error with the variable's name
