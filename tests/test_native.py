"""Builds the native tests and runs them, plain and under sanitizers.

They need neither MXNet nor Python: tests/cpp says what they check. Sanitized builds
take the generic kernels only, because compiling takes most of the time;
GLUON_SYNCBN_NATIVE=full builds and runs all instruction sets.
"""

import os
import shutil
import subprocess

import pytest
from helpers import ROOT

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("g++")),
        reason="the native tests need cmake and g++",
    ),
]
FULL = os.environ.get("GLUON_SYNCBN_NATIVE") == "full"
TESTS = sorted(path.stem for path in (ROOT / "tests/cpp").glob("*.cc"))


def run(*command):
    result = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout


@pytest.mark.parametrize("sanitizer", ["", "address,undefined", "thread"])
def test_native(sanitizer, tmp_path):
    options = ["-DGLUON_SYNCBN_BUILD_TESTS=ON", f"-DGLUON_SYNCBN_SANITIZE={sanitizer}"]
    targets, excluded = TESTS, []
    if sanitizer:
        options += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1"]
    if sanitizer and not FULL:
        options += ["-DHAVE_AVX2=OFF", "-DHAVE_AVX512=OFF"]
        excluded = ["-E", "test_kernels_"]  # what test_kernels runs already
        if sanitizer == "thread":  # the kernels themselves start no threads
            targets = [test for test in TESTS if test != "test_kernels"]
            excluded = ["-E", "test_kernels"]
    if shutil.which("ninja"):
        options += ["-G", "Ninja"]
    run("cmake", "-S", ROOT / "src", "-B", tmp_path, *options)
    run("cmake", "--build", tmp_path, "--parallel", "2", "--target", *targets)
    output = run("ctest", "--test-dir", tmp_path, "--output-on-failure", *excluded)
    assert "100% tests passed" in output and "test_collective" in output
