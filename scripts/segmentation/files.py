"""Files of a run: written whole or not at all, and read only if they are regular.

Called by checkpoint.py, report.py, folder_lock.py, the scripts and the data sets. It
must not know what a file holds.
"""

import contextlib
import fcntl
import io
import json
import os
import re
import secrets
import stat
from pathlib import Path

from .errors import UserError

_PART = re.compile(r"\..*\.[0-9a-f]{16}\.part", re.S)


def write_atomically(path, data):
    """Write the bytes `data` to a new file that then takes the place of `path`."""
    path, temporary = Path(path), None
    try:
        file, temporary = _new_part(path)
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"The file {path} cannot be written: {reason}.") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary or "")


def write_json(path, value):
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def write_png(path, picture):
    """Write a picture of Pillow's."""
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    write_atomically(path, buffer.getbuffer())


def _new_part(path):
    """A new file beside `path` and its name, which no other process uses.

    It is locked while its process lives, so that `remove_leftovers` can tell.
    """
    while True:
        name = f".{path.name[:40]}.{secrets.token_hex(8)}.part"
        temporary = os.path.join(path.parent, name)
        file = open(temporary, "xb")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, temporary
        file.close()  # removed as a leftover before it was locked


def remove_leftovers(folder):
    """Remove what killed processes were writing into a folder."""
    for path in Path(folder).iterdir():
        if _PART.fullmatch(path.name):
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


def open_regular(path, what="file"):
    """Open a file for reading; refuse a folder, and a pipe, which may block for ever.

    Raises
    ------
    UserError
        If there is no such file, it is no regular file or it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"There is no {what} {path}.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"The {what} {path} cannot be read: {reason}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"The {what} {path} is not a regular file.")
    return os.fdopen(descriptor, "rb")
