"""A run folder has one writer at a time, and files that are whole or not there."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from segmentation import files, folder_lock
from segmentation.errors import UserError
from support.helpers import PATH, run_python

PREAMBLE = """
import resource, sys, time
from segmentation import checkpoint, files, folder_lock
from segmentation.errors import exit_code
"""


@pytest.fixture(autouse=True)
def path_of_programs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)


def start(body, *arguments):
    """A process that runs `body` until it is killed; it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + body, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline()
    return process


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_lock_lives_as_long_as_its_process(tmp_path):
    folder = tmp_path / "new" / "run"
    holder = start(
        "with folder_lock.held(sys.argv[1]):\n    print(1, flush=True)\n"
        "    time.sleep(600)",
        folder,
    )
    try:
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
            with folder_lock.held(folder):
                pass
    finally:
        kill(holder)
    for _ in range(2):
        with folder_lock.held(folder):
            assert f"process {os.getpid()} on " in (folder / ".lock").read_text()
    assert names(folder) == [".lock"] and not (folder / ".lock").read_text()


def test_a_refused_lock_leaves_the_holders_name(tmp_path):
    with folder_lock.held(tmp_path):
        before = (tmp_path / ".lock").read_text()
        result = run_python(
            PREAMBLE + "sys.exit(exit_code(folder_lock.held(sys.argv[1]).__enter__))",
            tmp_path,
        )
        assert result.returncode == 2 and "in use by process" in result.stderr
        assert (tmp_path / ".lock").read_text() == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    tmp_path, monkeypatch, capsys, number
):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / f".last.npz.{16 * 'a'}.part").touch()
    with folder_lock.held(tmp_path):
        files.write_json(tmp_path / "log.json", [])
    assert "has no locks" in capsys.readouterr().err
    assert names(tmp_path) == [f".last.npz.{16 * 'a'}.part", ".lock", "log.json"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    body = (
        "file, name = files._new_part(files.Path(sys.argv[1]))\n"
        "print(name, flush=True)\ntime.sleep(600)"
    )
    dead, living = (start(body, tmp_path / "last.npz") for _ in range(2))
    try:
        for name in "mine.part", ".hidden.part", "a.npz":
            (tmp_path / name).touch()
        kill(dead)
        assert len(list(tmp_path.glob(".last.npz.*.part"))) == 2
        with folder_lock.held(tmp_path):
            (left,) = tmp_path.glob(".last.npz.*.part")
        assert Path(f"/proc/{living.pid}").exists()
        assert {"mine.part", ".hidden.part", "a.npz"} < set(names(tmp_path))
    finally:
        kill(living)
    files.remove_leftovers(tmp_path)
    assert not left.exists()


def test_a_new_file_removed_as_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Another process may clean up between the creation and the lock."""
    flock, removed = fcntl.flock, []

    def late(file, operation):
        if not removed:
            removed.append(file.name)
            os.unlink(file.name)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    files.write_json(tmp_path / "log.json", [1])
    assert removed and names(tmp_path) == ["log.json"]


def test_writers_and_readers_of_one_file_do_not_disturb_each_other(tmp_path):
    """Each reader sees what one of the writers has written, whole."""
    body = (
        "for number in range(300):\n"
        "    files.write_atomically(sys.argv[1], sys.argv[2].encode() * 50000)\n"
        "    number or print(1, flush=True)"
    )
    path = tmp_path / "last.npz"
    writers = [start(body, path, letter) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        files.remove_leftovers(tmp_path)
        assert path.read_bytes() in (b"a" * 50000, b"b" * 50000)
    for writer in writers:
        writer.stdout.close()
        assert writer.returncode == 0
    assert names(tmp_path) == ["last.npz"]


FULL_DISK = """
from support.checkpoints import a_checkpoint
state = a_checkpoint()
checkpoint.save(sys.argv[1], state)
state.parameters["w"] = state.parameters["w"].repeat(10**5)
resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
sys.exit(exit_code(checkpoint.save, sys.argv[1], state))
"""


def test_a_full_disk_is_one_sentence_and_keeps_the_former_checkpoint(tmp_path):
    path = tmp_path / "last.npz"
    result = run_python(PREAMBLE + FULL_DISK, path)
    words = f"error: The file {path} cannot be written: File too large.\n"
    assert (result.returncode, result.stderr) == (2, words)
    assert names(tmp_path) == ["last.npz"] and path.stat().st_size < 10**5


@pytest.mark.parametrize("target", ["/dev/full", "closed pipe"])
def test_output_that_cannot_be_printed_is_one_sentence(target):
    """Python reports it once more when it exits, if it is left to that."""
    if target == "/dev/full":
        output = os.open(target, os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    code = PREAMBLE + "sys.exit(exit_code(print, 'hello'))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    os.close(output)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("error: The system reports: ")


@pytest.mark.parametrize(
    "name,words", [("x" * 300, "File name too long"), ("file/run", "Not a directory")]
)
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, name, words):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^The run folder .* cannot be .*{words}.$"):
        with folder_lock.held(tmp_path / name):
            pass


@pytest.mark.parametrize("name", ["x" * 300 + ".png", "none/a.png", "."])
def test_a_file_that_cannot_be_made_is_one_sentence(tmp_path, name):
    with pytest.raises(UserError, match="^The file .* cannot be written: .*[.]$"):
        files.write_atomically(tmp_path / name, b"")
    assert not names(tmp_path)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in "pipe", ".", "/dev/zero":
        with pytest.raises(UserError, match="is not a regular file"):
            files.open_regular(tmp_path / name)
    with pytest.raises(UserError, match="There is no image"):
        files.open_regular(tmp_path / "none", "image")
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        files.open_regular(tmp_path / ("x" * 300))
