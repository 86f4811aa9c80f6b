"""Finds the lines at which the program stands; the error of a wait shows them.

It must not know what is waited for.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
import sysconfig
import threading

import mxnet as mx

from .library import load

_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)),
    os.path.dirname(mx.__file__),
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
)
_NOT_THE_USERS = tuple(os.path.join(path, "") for path in _LIBRARIES)


@ctypes.CFUNCTYPE(None)
def _locate():
    try:
        load().gluon_syncbn_tell_where(where_threads_stand())
    except BaseException:  # the error of the wait is told without it
        pass


def tell_where(is_known: bool) -> None:
    """Lets errors of waits show where the program stands, or no longer."""
    load().gluon_syncbn_set_locator(_locate if is_known else None)


def where_threads_stand() -> str:
    """A line for each thread that runs the user's program, the main thread's first."""
    frames, main = sys._current_frames(), threading.main_thread()  # noqa: SLF001
    threads = {main.ident: main, **{t.ident: t for t in threading.enumerate()}}
    lines = ""
    for ident, thread in threads.items():
        place = _place(frames.get(ident or 0))
        if place:
            name = "The program" if thread is main else f"Its thread '{thread.name}'"
            lines += f"\n{name} stands at {place}"
    return lines


def _place(frame):
    """File, line, function and source of the innermost frame that is the user's."""
    while frame is not None:
        code = frame.f_code
        path = os.path.abspath(code.co_filename)
        if not path.startswith(_NOT_THE_USERS) and "<frozen" not in code.co_filename:
            break
        frame = frame.f_back
    else:
        return ""
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    inside = "" if code.co_name == "<module>" else f", in {code.co_name}"
    source = f": {source}" if source else ""
    return f"{_relative(code.co_filename)}:{frame.f_lineno}{inside}{source}"


def _relative(path):
    """The path as seen from the working directory, if it is below that."""
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path
