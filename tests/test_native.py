"""Builds the native tests and runs them, plain and under sanitizers.

They need neither MXNet nor Python: tests/cpp says what they check. Sanitized builds
take the generic kernels only and no emulated GPU, because compiling takes most of the
time; GLUON_SYNCBN_NATIVE=full builds and runs everything.
"""

import os
import shutil
import sys

import pytest
from helpers import ROOT, run_tool

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("g++")),
        reason="the native tests need cmake and g++",
    ),
]
FULL = os.environ.get("GLUON_SYNCBN_NATIVE") == "full"
EMULATED = ("test_cuda_kernels", "test_cuda_op")  # GPUs, see tests/cpp/emulated_cuda
VECTORS = ("test_streamed_stores",)  # of which the generic kernels have none
TESTS = sorted(path.stem for path in (ROOT / "tests/cpp").glob("*.cc"))


def test_nothing_is_destroyed_at_exit(tmp_path):
    """Operators run until the process ends, behind static objects' destructors."""
    options = [
        "-O1",
        "-std=c++17",
        f"-I{ROOT / 'src'}",
        "-c",
        "-o",
        tmp_path / "object",
    ]
    options += [f"-I{ROOT / 'tests/cpp/emulated_cuda'}", f"-I{ROOT / 'tests/cpp'}"]
    for source in (
        "op/cuda/current_device.cc",
        "op/cuda/lane.cc",
        "collective/registry.cc",
    ):
        run_tool("g++", *options, ROOT / "src" / source)
        assert "__cxa_atexit" not in run_tool("nm", tmp_path / "object"), source


@pytest.mark.parametrize("sanitizer", ["", "address,undefined", "thread"])
def test_native(sanitizer, tmp_path):
    options = ["-DGLUON_SYNCBN_BUILD_TESTS=ON", f"-DGLUON_SYNCBN_SANITIZE={sanitizer}"]
    targets, excluded = TESTS, []
    if sanitizer:
        options += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1"]
    if sanitizer and not FULL:
        options += ["-DHAVE_AVX2=OFF", "-DHAVE_AVX512=OFF"]
        targets = [test for test in TESTS if test not in (*EMULATED, *VECTORS)]
        excluded = ["-E", "_(generic|avx2)"]  # what runs without a limit already
    if sanitizer == "thread":
        # It cannot follow an emulated GPU's threads, and kernels start none themselves.
        absent = "test_kernels", *EMULATED, *VECTORS
        targets = [test for test in TESTS if test not in absent]
        excluded = ["-E", "_(generic|avx2)|test_kernels"]
    if targets != TESTS:
        excluded[1] += "|" + "|".join((*EMULATED, *VECTORS))
    if shutil.which("ninja"):
        options += ["-G", "Ninja"]
    run_tool("cmake", "-S", ROOT / "src", "-B", tmp_path, *options)
    run_tool("cmake", "--build", tmp_path, "--parallel", "2", "--target", *targets)
    options = ["--output-on-failure", "--parallel", "2"]
    output = run_tool("ctest", "--test-dir", tmp_path, *options, *excluded)
    assert "100% tests passed" in output and "test_collective" in output
    if not sanitizer:
        check_model_of_exchanges(run_tool(tmp_path / "test_many_ranks", "--count"))


def check_model_of_exchanges(counted):
    """What scripts/benchmark_exchange.py calculates with is what exchanges do."""
    sys.path.append(str(ROOT / "scripts"))
    import benchmark_exchange

    ranks = [list(map(int, line.split())) for line in counted.splitlines()]
    assert [row[0] for row in ranks if row[0] in (64, 256, 1024)] == [64, 256, 1024]
    for size, rounds, messages in ranks:
        assert rounds == benchmark_exchange.rounds(size), size
        assert messages == benchmark_exchange.messages(size), size
