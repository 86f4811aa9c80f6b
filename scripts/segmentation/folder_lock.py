"""One process at a time writes into a run folder: a lock that dies with its process.

Called by train_segmentation.py and the ablation, in the one process that writes.
Readers need no lock, because files are replaced whole. The lock is an flock on a file:
the system releases it however a process ends, and NFS knows it between machines, though
only on files that are open for writing. The file stays, because another process may
have it open already.
"""

import contextlib
import errno
import fcntl
import os
import socket
import sys
from pathlib import Path

from .errors import UserError
from .files import remove_leftovers

_HELD = errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP


@contextlib.contextmanager
def held(folder):
    """Make the folder if need be, and hold its lock; UserError if another does."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(folder / ".lock", flags, 0o666)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error.strerror}."
        ) from None
    with open(descriptor, "r+", encoding="utf-8", errors="replace") as file:
        if _lock(file, folder):
            _write(file, f"process {os.getpid()} on {socket.gethostname()}")
            remove_leftovers(folder)
        try:
            yield folder
        finally:
            _write(file, "")


def _lock(file, folder):
    """Lock the open file; False where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in _HELD:
            holder = file.read(200).strip() or "another process"
            raise UserError(
                f"The run folder {folder} is in use by {holder}: wait for its end, or "
                "give another --run-dir."
            ) from None
        if error.errno not in _NO_LOCKS:
            raise
    print(
        f"warning: the file system of {folder} has no locks; see to it yourself that "
        "no other process trains into this folder",
        file=sys.stderr,
    )
    return False


def _write(file, text):
    """Say who holds the lock; on a full disk it is held all the same."""
    with contextlib.suppress(OSError):
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()
