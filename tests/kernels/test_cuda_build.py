"""The build of the CUDA kernels: architectures, no spills, an error without nvcc.

tests/cpp runs the kernels on an emulated GPU; test_build.py builds without CUDA.
"""

import os
import re
import shutil
import subprocess

import gluon_syncbn

import pytest
from support.helpers import ROOT

SOURCES = sorted((ROOT / "src/kernels/cuda").glob("*.cu"))
# The library's objects; src/keep_report.sh keeps ptxas's report beside each.
BUILT = ROOT / "build/native/CMakeFiles/gluon_syncbn_objects.dir/kernels/cuda"

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


@pytest.mark.usefixtures("nvcc")
@pytest.mark.skipif(
    not (BUILT / f"{SOURCES[0].name}.o").exists(),
    reason="the package was not built in this checkout",
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_local_memory(source):
    """No register spills: a spill is slow, and a change can add one unseen."""
    report = (BUILT / f"{source.name}.o.txt").read_text()
    kernels = re.findall(r"Compiling entry function '\w+' for '(\w+)'", report)
    built_for = gluon_syncbn.features()["cuda_architectures"]
    assert {f"sm_{name[:-5]}" for name in built_for if "real" in name} == set(kernels)
    frames = re.findall(
        r"for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores", report
    )
    assert len(frames) == len(kernels) > 0
    assert [frame for frame in frames if frame[1:] != ("0", "0")] == []


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
