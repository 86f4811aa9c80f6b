"""The build of the CUDA kernels: architectures, an error without nvcc.

tests/cpp runs the kernels on an emulated GPU; test_build.py builds without CUDA.
"""

import os
import re
import shutil
import subprocess

import gluon_syncbn

import pytest
from support.helpers import ROOT

# The build takes the first architecture of each; its code runs on the later ones.
GENERATIONS = {5, 6, 7, 8, 9}


@pytest.fixture(scope="module")
def nvcc(tmp_path_factory):
    """Return PATH's nvcc, or skip: an old one has no C++17, or refuses this g++."""
    path = shutil.which("nvcc")
    if path is None:
        pytest.skip("there is no nvcc on PATH")
    source = tmp_path_factory.mktemp("nvcc") / "empty.cu"
    source.touch()
    command = path, "-std=c++17", "-c", source, "-o", source.with_suffix(".o")
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    if compiled.returncode:
        pytest.skip(f"{path} does not work: {compiled.stderr.strip()}")
    return path


@pytest.mark.skipif(
    bool({"GLUON_SYNCBN_CUDA", "CUDAARCHS"} & set(os.environ)),
    reason="GLUON_SYNCBN_CUDA or CUDAARCHS is set",
)
def test_library_has_an_architecture_of_each_generation(nvcc):
    *real, virtual = gluon_syncbn.features()["cuda_architectures"]
    known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True)
    expected = {int(n) // 10 for n in re.findall(r"compute_(\d+)\b", known)}
    assert {int(name[:2]) // 10 for name in real} == expected & GENERATIONS
    assert virtual == real[-1].replace("real", "virtual")


def test_asked_for_cuda_without_nvcc(tmp_path):
    """GLUON_SYNCBN_CUDA=1 makes the absence of nvcc an error."""
    no_nvcc = {"GLUON_SYNCBN_CUDA": "1", "CUDACXX": str(tmp_path / "no_such_nvcc")}
    result = subprocess.run(
        ["cmake", "-S", ROOT / "src", "-B", tmp_path, "-G", "Ninja"],
        env={**os.environ, **no_nvcc},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "GLUON_SYNCBN_CUDA=1, but there is no nvcc" in result.stderr
