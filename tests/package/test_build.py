"""The build: compilers, a source distribution, and a wheel of this distribution."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import gluon_syncbn

import pytest
from support.helpers import ROOT, output_of, run_tool

MAKE_SDIST = (
    "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
)
FEATURES = """
import sys
sys.path.remove("")  # otherwise the checkout is imported
import gluon_syncbn
print(gluon_syncbn.features()["version"], gluon_syncbn.features()["commit"])
"""


def errors_of(*command):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    result = subprocess.run(list(map(str, command)), **options)
    assert result.returncode != 0
    return result.stderr


def test_without_a_compiler_the_last_line_is_the_error(tmp_path, monkeypatch):
    for name in "CXX", "CMAKE_TOOLCHAIN_FILE":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    folders = "--build-lib", tmp_path, "--build-temp", tmp_path
    errors = errors_of(sys.executable, "setup.py", "build_ext", *folders)
    (*_, text) = errors.splitlines()
    assert text.startswith("building gluon_syncbn needs a C++ compiler such as g++, bu")
    assert "Install one, or a wheel of gluon_syncbn" in text


@pytest.mark.skipif(
    not (gluon_syncbn.features()["cuda"] and shutil.which("nvcc"))
    or "CUDAARCHS" in os.environ,
    reason="CUDAARCHS is set, or there are no CUDA kernels or no nvcc",
)
def test_library_has_an_architecture_of_each_generation():
    """Generations are Maxwell (5) to Hopper (9). The newest one also has PTX."""
    *real, virtual = gluon_syncbn.features()["cuda_architectures"]
    known = run_tool("nvcc", "--list-gpu-arch")
    expected = {int(n) // 10 for n in re.findall(r"compute_(\d+)\b", known)}
    assert {int(name[:2]) // 10 for name in real} == expected & {5, 6, 7, 8, 9}
    assert virtual == real[-1].replace("real", "virtual")


def test_fast_math_is_an_error_of_the_build():
    """The setting nonfinite= would do nothing."""
    options = "-std=c++17", "-fsyntax-only", "-ffast-math", "-I", ROOT / "src"
    errors = errors_of("c++", *options, ROOT / "src" / "exchange" / "exchange.cc")
    assert "must be compiled without -ffast-math" in errors


def test_asked_for_cuda_without_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_CUDA", "1")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "no_such_nvcc"))
    errors = errors_of("cmake", "-S", ROOT / "src", "-B", tmp_path, "-G", "Ninja")
    assert "GLUON_SYNCBN_CUDA=1, but there is no nvcc" in errors


TOO_NEW = "unsupported GNU version! gcc versions later than 11 are not supported!"
NVCC = f"""#!/bin/sh
echo "host_config.h:132:2: error: #error -- {TOO_NEW} The nvcc flag" \\
    "'-allow-unsupported-compiler' can be used to override this version check" >&2
exit 1
"""


def test_a_host_compiler_that_nvcc_refuses(tmp_path, monkeypatch):
    """One line is kept of nvcc's error, once for an nvcc and a script that calls it."""
    script = f'#!/bin/sh\nexec "{tmp_path}/nvcc" "$@"\n'
    for name, text in ("nvcc", NVCC), ("script", script):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("GLUON_SYNCBN_CUDA", "1")
    monkeypatch.setenv("CUDACXX", f"{tmp_path / 'script'};{tmp_path / 'nvcc'}")
    command = "cmake", "-S", ROOT / "src", "-B", tmp_path / "build", "-G", "Ninja"
    errors = " ".join(errors_of(*command).split())  # CMake wraps lines
    assert errors.count(TOO_NEW) == 1 and "CUDAHOSTCXX" in errors
    assert "allow-unsupported-compiler" not in errors


def files_below(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_source_distribution_has_its_commit_and_builds(tmp_path, monkeypatch):
    checkout, python = tmp_path / "checkout", tmp_path / "venv/bin/python"
    run_tool("git", "clone", "--quiet", ROOT, checkout)
    head = run_tool("git", "-C", checkout, "rev-parse", "HEAD").strip()
    run_tool(sys.executable, "-m", "venv", tmp_path / "venv")
    run_tool(python, "-m", "pip", "install", "-q", "setuptools>=70.1,<81")

    monkeypatch.chdir(checkout)
    run_tool(python, "-c", MAKE_SDIST, tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path)
    sdist = tmp_path / archive.name[: -len(".tar.gz")]
    for name in "src", "gluon_syncbn":
        assert files_below(sdist / name) == files_below(checkout / name)

    # The build uses the MPI of pip's build environment if this PATH has no other MPI.
    monkeypatch.setenv("GLUON_SYNCBN_CUDA", "0")
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    wheel = "wheel", "--no-deps", "--wheel-dir", tmp_path, archive
    run_tool(python, "-m", "pip", *wheel)
    version = gluon_syncbn.__version__
    (file,) = tmp_path.glob(f"gluon_syncbn-{version}-0cpu-py3-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
    modules = {f for f in files_below(sdist / "gluon_syncbn") if f.endswith(".py")}
    installed = files_below(tmp_path / "site" / "gluon_syncbn")
    others = {"libgluon_syncbn.so", "hang.md", "py.typed"}
    assert installed - {"libgluon_syncbn_mpi.so"} == modules | others
    for library in (tmp_path / "site").rglob("*.so"):
        assert "build-env" not in run_tool("readelf", "-d", library)  # pip deletes it
    found = output_of(FEATURES, PYTHONPATH=str(tmp_path / "site"))
    assert found.split() == [version, head]
