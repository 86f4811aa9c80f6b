"""Writes files of a run that are whole or not there.

Called by checkpoint.py, report.py, the scripts and the ablation. It must not know what
a file holds.
"""

import contextlib
import io
import json
import os
from pathlib import Path

from .errors import UserError


def write_atomically(path, data):
    """Write the bytes `data` to a new file that then takes the place of `path`."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(
            f"The file {path} cannot be written: {error.strerror}."
        ) from None


def write_json(path, value):
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def write_png(path, picture):
    """Write a picture of Pillow's."""
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    write_atomically(path, buffer.getbuffer())
