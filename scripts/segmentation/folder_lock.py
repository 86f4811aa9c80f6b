"""One process at a time writes into a run folder: a lock that dies with its process.

Called by train_segmentation.py and the ablation, in the one process that writes.
Readers need no lock, because files are replaced whole.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from .errors import UserError


@contextlib.contextmanager
def held(folder):
    """Make the folder if need be, and hold its lock; UserError if another does."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays, because another process may have opened it already.
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"The run folder {folder} is in use by process {file.read()}: wait for "
                "its end, or give another --run-dir."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield folder
