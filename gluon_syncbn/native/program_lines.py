"""Lines of the user's program, which warnings and the errors of layers show."""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from contextlib import suppress

import mxnet as mx

from .library import load

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
def locate() -> None:
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
