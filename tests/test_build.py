"""Building in one checkout, again and again, and the choice of an nvcc.

A build depends on nothing that an earlier one left but objects, and says what it has
built. Stand-ins make it quick: a compiler that does less, and nvccs that do nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_python, run_tool

PTXAS = "ptxas fatal   : Value 'sm_52' is not defined for option 'gpu-name'"
FEATURES = """
import sys
sys.path.remove("")  # which comes before what was installed
import gluon_syncbn
features = gluon_syncbn.features()
print(features["library"], features["cuda_missing"], sep="|")
"""
# It does not optimize, and knows one instruction set of three.
COMPILER = 'case "$*" in *-mavx*) exit 1;; esac; exec g++ "$@" -O0'
TRACKED = "git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"


def executable(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def working_nvcc(folder):
    return executable(folder / "nvcc", "exit 0")


def broken_nvcc(folder):
    return executable(folder / "nvcc", f'echo "{PTXAS}" >&2; exit 255')


# ------------------------------------------------------------- the choice of an nvcc


def find_nvcc(tmp_path, folders=(), **environment):
    """(the nvcc that is taken, what is said of others)"""
    script = tmp_path / "find.cmake"
    script.write_text(
        f"cmake_minimum_required(VERSION 3.18)\ninclude({ROOT}/src/nvcc.cmake)\n"
        'find_nvcc(nvcc reason)\nmessage("${nvcc}|${reason}")\n'
    )
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    inherited = {k: v for k, v in os.environ.items() if k != "CUDACXX"}
    result = subprocess.run(
        ["cmake", "-P", str(script)],
        cwd=tmp_path,
        env={**inherited, "PATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return result.stderr.strip().split("|")


def test_the_nvcc_that_path_names_first_is_taken(tmp_path):
    first, second = working_nvcc(tmp_path / "1"), working_nvcc(tmp_path / "2")
    folders = [tmp_path / "none", tmp_path / "1", tmp_path / "2"]
    assert find_nvcc(tmp_path, folders) == [first, ""]
    assert find_nvcc(tmp_path, reversed(folders)) == [second, ""]


def test_one_that_does_not_work_is_named_and_the_next_is_taken(tmp_path):
    broken, works = broken_nvcc(tmp_path / "1"), working_nvcc(tmp_path / "2")
    nvcc, reason = find_nvcc(tmp_path, [tmp_path / "1", tmp_path / "2"])
    assert nvcc == works
    assert reason.startswith(f"{broken} does not work: ptxas fatal : Value 'sm_52'")


def test_the_one_that_is_asked_for_is_the_only_one(tmp_path):
    works = working_nvcc(tmp_path / "1")
    broken = broken_nvcc(tmp_path / "2")
    nvcc, reason = find_nvcc(tmp_path, [tmp_path / "1"], CUDACXX=broken)
    assert nvcc == "" and reason.startswith(f"{broken} does not work")
    assert find_nvcc(tmp_path, [tmp_path / "2"], CUDACXX=works) == [works, ""]
    reason = find_nvcc(tmp_path, CUDACXX="/no/nvcc")[1]
    assert reason == "/no/nvcc does not work: no such file or directory"


# -------------------------------------------------------------------- one checkout


class Checkout:
    """A copy of the tree, and what pip does in it, each time in another isolation."""

    def __init__(self, folder):
        self.root = folder / "checkout"
        for name in run_tool(*TRACKED).split("\n"):
            if name and (ROOT / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
        self.environment = {
            **os.environ,
            "CXX": executable(folder / "g++", COMPILER),
            "CUDACXX": broken_nvcc(folder),
            "PIP_NO_COMPILE": "1",
        }
        self.environment.pop("GLUON_SYNCBN_CUDA", None)

    def pip(self, *arguments, python=sys.executable, **environment):
        """Runs pip as users do, without -v, on a terminal of its own.

        Returns its exit status, what it printed, and what came to the terminal beside.
        """
        command = [python, "-m", "pip", *arguments]
        ours, terminal = os.openpty()
        result = subprocess.run(
            ["setsid", "-c", *map(str, command)],
            cwd=self.root,
            env={**self.environment, **environment},
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        os.set_blocking(ours, False)
        try:
            said = os.read(ours, 2**16).decode()
        except BlockingIOError:
            said = ""
        os.close(ours)
        os.close(terminal)
        return result.returncode, result.stdout, said

    def install(self, target, *options, **environment):
        """Installs into a folder; returns what pip and the build said, and features."""
        options = "--no-deps", "--target", target, *options, "."
        status, output, said = self.pip("install", *options, **environment)
        assert status == 0, output[-5000:]
        features = run_python(FEATURES, PYTHONPATH=str(target)).stdout
        library, missing = features.strip().split("|")
        assert library == str(target / "gluon_syncbn/libgluon_syncbn.so")
        return output, said, missing

    def objects(self):
        """When each object was compiled."""
        folder = self.root / "build/native/CMakeFiles/gluon_syncbn_objects.dir"
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.o")}


def another_python():
    """Another Python that can install the package, of PATH or of pyenv, or None."""
    minors = [n for n in range(8, 12) if n != sys.version_info.minor]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [path for n in minors for path in pyenv.glob(f"3.{n}.*/bin/python")]
    for python in [*found, *(f"python3.{n}" for n in minors)]:
        command = [python, "-m", "pip", "--version"]
        if shutil.which(python) and subprocess.run(command).returncode == 0:
            return python
    return None


@pytest.mark.timeout(1800)
def test_one_checkout_is_built_again_and_again(tmp_path):
    checkout = Checkout(tmp_path)
    output, said, missing = checkout.install(tmp_path / "1", GLUON_SYNCBN_CUDA="0")
    assert "-0cpu-py3-none-" in output
    assert missing == "it was built with GLUON_SYNCBN_CUDA=0"
    assert f"gluon_syncbn: for the CPU alone: {missing}\r\n" in said

    # With another option; and a module that was removed in between stays away.
    (checkout.root / "gluon_syncbn/plain_loop.py").unlink()
    (checkout.root / "gluon_syncbn/__init__.py").write_text("from ._library import *\n")
    output, said, missing = checkout.install(tmp_path / "2")
    broken = checkout.environment["CUDACXX"]
    assert missing == f"{broken} does not work: {' '.join(PTXAS.split())}"
    assert "-0cpu.nvcc_does_not_work-py3-none-" in output
    assert f"gluon_syncbn: {missing}\r\n" in said
    assert not (tmp_path / "2/gluon_syncbn/plain_loop.py").exists()
    compiled = checkout.objects()
    assert len(compiled) > 10

    # Editable, and as a wheel that another Python makes.
    editable = "--ignore-installed", "--prefix", tmp_path / "editable", "-e", "."
    status, output, _ = checkout.pip("install", "--no-deps", *editable)
    assert status == 0, output[-5000:]
    assert (checkout.root / "gluon_syncbn/libgluon_syncbn.so").exists()
    wheel = "wheel", "--no-deps", "-w", tmp_path / "wheels", "."
    status, output, _ = checkout.pip(*wheel, python=another_python() or sys.executable)
    assert status == 0, output[-5000:]
    assert len(list((tmp_path / "wheels").glob("*-0cpu.nvcc_*-py3-none-*.whl"))) == 1
    assert checkout.objects() == compiled, "nothing has changed for a compiler"

    # An error is CMake's own.
    status, output, _ = checkout.pip("install", "--no-deps", ".", CXX="/no/compiler")
    assert status != 0 and "CMake Error at " in output.split("failed in `")[1]
    assert "/no/compiler" in output.split("failed in `")[1]
