"""Finds the lines at which the program stands: errors of waits and warnings show them.

It must not know what is waited for.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
import sysconfig
import threading
import warnings

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


def warn(text: str) -> None:
    """Warns with the line of the program that has led here."""
    frame, level = sys._getframe(), 1  # noqa: SLF001
    users = _users_frame(frame)
    while frame is not users and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


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
    frame = _users_frame(frame)
    if frame is None:
        return ""
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    inside = "" if code.co_name == "<module>" else f", in {code.co_name}"
    source = f": {source}" if source else ""
    return f"{_relative(code.co_filename)}:{frame.f_lineno}{inside}{source}"


def _users_frame(frame):
    """The innermost one that is neither a library's nor Python's own; None if none."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_main = frame.f_globals.get("__name__") == "__main__"
        # MXNet generates its operators' functions from text, with the file "<string>".
        is_generated = file.startswith("<") and not is_main
        if not (is_generated or os.path.abspath(file).startswith(_NOT_THE_USERS)):
            break
        frame = frame.f_back
    return frame


def _relative(path):
    """The path as seen from the working directory, if it is below that."""
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path
