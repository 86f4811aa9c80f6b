"""Writes files of a run that are whole or not there.

Called by checkpoint.py, report.py, the scripts and the ablation. It must not know what
a file holds.
"""

import contextlib
import json
import os
from pathlib import Path

from .errors import UserError


@contextlib.contextmanager
def replacing(path):
    """Open a new file for bytes, which takes the place of `path` in the end."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:
        raise UserError(
            f"The file {path} cannot be written: {error.strerror or error}."
        ) from None
    finally:
        with contextlib.suppress(OSError):  # it is gone if all went well
            part.unlink()


def write_json(path, value):
    with replacing(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())
