"""The user's current lines, which timeouts and warnings show."""

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
    except BaseException:  # the timeout's error is raised without these lines
        pass


def tell_where(is_known: bool) -> None:
    """Make errors of waits show the program's lines, or stop that."""
    load().gluon_syncbn_set_locator(_locate if is_known else None)


def warn(text: str) -> None:
    """Issue a warning for the user's line that has called this package."""
    frame, level = sys._getframe(), 1  # noqa: SLF001
    users = _users_frame(frame)
    while frame is not users and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def where_threads_stand() -> str:
    """Return a line of text for each thread of the user's program, main first."""
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
    """Return file, line, function and source of the user's innermost frame."""
    frame = _users_frame(frame)
    if frame is None:
        return ""
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    inside = "" if code.co_name == "<module>" else f", in {code.co_name}"
    source = f": {source}" if source else ""
    return f"{_relative(code.co_filename)}:{frame.f_lineno}{inside}{source}"


def _users_frame(frame):
    """Return the innermost frame that is not a library's or Python's own, or None."""
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
    """Return the path relative to the working directory if it is below it."""
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path
