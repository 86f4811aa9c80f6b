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
from support.checkout import PTXAS, Checkout, broken_nvcc, executable
from support.helpers import ROOT, run_python


def working_nvcc(folder):
    return executable(folder / "nvcc", "exit 0")


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
    assert reason.lower() == "/no/nvcc does not work: no such file or directory"


def test_without_a_compiler_the_build_ends_in_one_sentence(tmp_path):
    chosen = "CXX", "CMAKE_TOOLCHAIN_FILE"
    environment = {k: v for k, v in os.environ.items() if k not in chosen}
    # An isolated build has the package wheel, which this environment may lack.
    stub = tmp_path / "wheel" / "bdist_wheel.py"
    stub.parent.mkdir()
    stub.write_text("from setuptools import Command as bdist_wheel")
    folders = "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env={**environment, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    (*_, text) = result.stderr.splitlines()
    assert text.startswith("building gluon_syncbn needs a C++ compiler such as g++, bu")
    assert "install one, or a wheel of gluon_syncbn" in text


# -------------------------------------------------------------------- one checkout


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


FEATURES = """
import gluon_syncbn
print(gluon_syncbn.features()["cuda"], gluon_syncbn.features()["cuda_missing"])
"""


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_one_checkout_is_built_again_and_again(tmp_path):
    checkout = Checkout(tmp_path)
    no_cuda = {"GLUON_SYNCBN_CUDA": "0"}
    output, missing = checkout.install(tmp_path / "1", **no_cuda)
    assert "-0cpu-py3-none-" in output
    assert missing == "GLUON_SYNCBN_CUDA=0 was set"
    assert f"gluon_syncbn: builds for the CPU alone: {missing}\n" in output
    compiled = checkout.objects()
    assert len(compiled) > 10

    # Editable; it tells why it has no CUDA.
    editable = "--ignore-installed", "--prefix", tmp_path / "editable", "-e", "."
    status, output = checkout.pip("install", "--no-deps", *editable, **no_cuda)
    assert status == 0, output[-5000:]
    assert checkout.objects() == compiled, "nothing has changed for a compiler"
    library = checkout.root / "gluon_syncbn/libgluon_syncbn.so"
    result = run_python(FEATURES, GLUON_SYNCBN_LIBRARY=str(library))
    assert result.stdout == f"False {missing}\n", result.stderr

    # With another option; and a module that was removed in between stays away.
    (checkout.root / "gluon_syncbn/parallel/plain_loop.py").unlink()
    (checkout.root / "gluon_syncbn/__init__.py").write_text(
        "from .native.library import *\n"
    )
    output, missing = checkout.install(tmp_path / "2")
    broken = checkout.environment["CUDACXX"]
    assert missing == f"{broken} does not work: {' '.join(PTXAS.split())}"
    assert "-0cpu.nvcc_does_not_work-py3-none-" in output
    assert f"gluon_syncbn: {missing}\n" in output
    assert not (tmp_path / "2/gluon_syncbn/parallel/plain_loop.py").exists()
    compiled = checkout.objects()

    # As a wheel that another Python makes.
    wheel = "wheel", "--no-deps", "-w", tmp_path / "wheels", "."
    status, output = checkout.pip(*wheel, python=another_python() or sys.executable)
    assert status == 0, output[-5000:]
    assert len(list((tmp_path / "wheels").glob("*-0cpu.nvcc_*-py3-none-*.whl"))) == 1
    assert checkout.objects() == compiled, "nothing has changed for a compiler"

    # An error is CMake's own.
    status, output = checkout.pip("install", "--no-deps", ".", CXX="/no/compiler")
    assert status != 0 and "CMake Error at " in output.split("failed in `")[1]
    assert "/no/compiler" in output.split("failed in `")[1]
