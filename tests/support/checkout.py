"""A copy of the checkout in which pip installs, and stand-ins for its tools."""

import os
import subprocess
import sys

from support.helpers import ROOT, run_python, run_tool

PTXAS = "ptxas fatal   : Value 'sm_52' is not defined for option 'gpu-name'"
FEATURES = """
import sys
sys.path.remove("")  # or else the checkout is imported
import gluon_syncbn
features = gluon_syncbn.features()
print(features["library"], features["cuda_missing"], sep="|")
"""
# It does not optimize, and knows one instruction set of three.
COMPILER = 'case "$*" in *-mavx*) exit 1;; esac; exec g++ "$@" -O0'
# Headers take most of the time that is left, so two sources are compiled as one.
TOOLCHAIN = "set(CMAKE_UNITY_BUILD ON)\nset(CMAKE_UNITY_BUILD_BATCH_SIZE 2)\n"
TRACKED = "git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"


def executable(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def broken_nvcc(folder):
    return executable(folder / "nvcc", f'echo "{PTXAS}" >&2; exit 255')


class Checkout:
    """A copy of the tree, and what pip does in it, each time in another isolation."""

    def __init__(self, folder):
        self.root = folder / "checkout"
        for name in run_tool(*TRACKED).split("\n"):
            if name and (ROOT / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
        toolchain = folder / "toolchain.cmake"
        toolchain.write_text(TOOLCHAIN)
        self.environment = {
            **os.environ,
            "CMAKE_TOOLCHAIN_FILE": str(toolchain),
            "CXX": executable(folder / "g++", COMPILER),
            "CUDACXX": broken_nvcc(folder),
            "PIP_NO_COMPILE": "1",
        }
        self.environment.pop("GLUON_SYNCBN_CUDA", None)

    def pip(self, *arguments, python=sys.executable, **environment):
        """Runs pip; returns its exit status and its output."""
        result = subprocess.run(
            [str(python), "-m", "pip", *map(str, arguments)],
            cwd=self.root,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        return result.returncode, result.stdout

    def install(self, target, **environment):
        """Installs into a folder; returns what the build said, and why no CUDA."""
        options = "--verbose", "--no-deps", "--target", target
        status, output = self.pip("install", *options, ".", **environment)
        assert status == 0, output[-5000:]
        features = run_python(FEATURES, PYTHONPATH=str(target)).stdout
        library, missing = features.strip().split("|")
        assert library == str(target / "gluon_syncbn/libgluon_syncbn.so")
        return output, missing

    def objects(self):
        """The time at which each object was compiled."""
        folder = self.root / "build/native/CMakeFiles/gluon_syncbn_objects.dir"
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.o")}
