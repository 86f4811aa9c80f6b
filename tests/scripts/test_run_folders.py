"""A run folder has one writer at a time, and files that are whole or not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from segmentation import files, folder_lock
from segmentation.errors import UserError
from support.helpers import PATH

HOLDER = """
import sys, time
from segmentation import folder_lock
with folder_lock.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_lives_as_long_as_its_process(tmp_path):
    folder = tmp_path / "new" / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder],
        env={**os.environ, "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout.readline()
        for _ in range(2):  # a refusal leaves the holder's number
            with pytest.raises(UserError, match=f"in use by process {holder.pid}: "):
                with folder_lock.held(folder):
                    pass
        holder.kill()
    with folder_lock.held(folder):
        assert (folder / ".lock").read_text() == str(os.getpid())


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path, monkeypatch):
    path, write = tmp_path / "last.npz", Path.write_bytes
    files.write_atomically(path, b"before")

    def full(self, data):
        write(self, data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="last.npz cannot be written: No space left on"):
        files.write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
