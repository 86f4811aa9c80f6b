"""Build the native tests of tests/cpp and run them, plain and under sanitizers.

Sanitized builds have the generic kernels only and no emulated GPU, because compiling
takes most of the time, unless GLUON_SYNCBN_NATIVE_TESTS=full asks for them.
"""

import json
import os
import platform
import shutil
import sys

from gluon_syncbn.layer import native_operator

import pytest
from support.helpers import ROOT, run_tool

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("g++")),
        reason="the native tests need cmake and g++",
    ),
]
FULL = os.environ.get("GLUON_SYNCBN_NATIVE_TESTS") == "full"
TESTS = {path.stem for path in (ROOT / "tests/cpp").glob("*.cc")}
EMULATED = {name for name in TESTS if name.startswith("test_cuda_")}


@pytest.mark.parametrize(
    "sanitizer",
    [
        "",
        pytest.param("address,undefined", marks=pytest.mark.full),
        pytest.param("thread", marks=pytest.mark.full),
    ],
)
def test_native(sanitizer, tmp_path, request):
    targets, excluded = TESTS, []
    if sanitizer == "thread" or (sanitizer and not FULL):
        # Even with FULL, the thread sanitizer cannot follow the emulated GPU's fibers.
        targets = TESTS - EMULATED
    if sanitizer == "thread":  # it has one thread, and would take minutes
        targets = targets - {"test_schedules"}
    if targets != TESTS:
        # Run test_kernels once only, with the best instruction set that was built.
        excluded = ["-E", "|".join(["_(generic|avx2)", *(TESTS - targets)])]
    build = build_targets(f"tests_{sanitizer}", sanitizer, targets)
    options = ["--output-on-failure", "--parallel", "2"]
    output = run_tool("ctest", "--test-dir", build, *options, *excluded)
    assert "100% tests passed" in output and "test_exchange" in output
    if not sanitizer:
        check_avx_code_has_no_weak_symbols(build)
    if not sanitizer and request.config.getoption("full"):
        check_all_parts_on_the_emulated_gpu(tmp_path / "out")


def build_targets(folder, sanitizer, targets):
    """Build targets in a folder that is kept, because compiling takes minutes."""
    build = ROOT / "build" / folder
    options = ["-DGLUON_SYNCBN_BUILD_TESTS=ON", f"-DGLUON_SYNCBN_SANITIZE={sanitizer}"]
    # Headers take most of the time of small sources, so several are compiled as one.
    options += ["-DCMAKE_UNITY_BUILD=ON"]
    if sanitizer:
        options += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-Og -g1"]
    if sanitizer and not FULL:
        options.append("-DGLUON_SYNCBN_WIDE_KERNELS=OFF")
    if shutil.which("ninja"):
        options += ["-G", "Ninja"]
    run_tool("cmake", "-S", ROOT / "src", "-B", build, *options)
    run_tool("cmake", "--build", build, "--parallel", "2", "--target", *targets)
    return build


@pytest.mark.full
def test_the_native_operator_under_the_address_sanitizer():
    """MXNet's engine calls it, so the sanitizer's library must be in the process."""
    if reason := native_operator.missing():
        pytest.skip(reason)
    # Another test may build the other targets at the same time.
    build = build_targets("operator_address", "address", ["gluon_syncbn"])
    names = "libasan.so", "libstdc++.so.6"
    libraries = [run_tool("g++", f"-print-file-name={n}").strip() for n in names]
    variables = {
        "LD_PRELOAD": " ".join(libraries),
        # Python and MXNet keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "GLUON_SYNCBN_LIBRARY": build / "libgluon_syncbn.so",
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    test = ROOT / "tests/layer/test_native_operator.py"
    run = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test
    assert " passed" in run_tool("env", *settings, *run)


def check_avx_code_has_no_weak_symbols(build):
    """Check that the linker cannot use AVX functions in code for all processors."""
    objects = [*build.rglob("isa_avx2.cc.o"), *build.rglob("isa_avx512.cc.o")]
    assert len(objects) >= 2 or platform.machine() != "x86_64"
    for file in objects:
        symbols = run_tool("nm", "--defined-only", file).splitlines()
        assert [line for line in symbols if set(line.split()) & {"W", "V", "u"}] == []


def check_all_parts_on_the_emulated_gpu(out):
    """Check that the parts for a CPU pass, and that a deadline leaves a summary."""
    run = ["env", "EMULATED=1", "bash", ROOT / "scripts/check_gpu.sh", out]
    lines = run_tool(*run).splitlines()
    assert "passed: build kernels operator benchmark; " in lines[-1]
    assert "FAILED: none" in lines[-1]
    rows = [json.loads(line) for line in lines if line.startswith('{"shape"')]
    assert len(rows) == 45 and all(row["verified"] for row in rows)
    ended = run_tool("bash", "-c", "EMULATED=1 bash $0 $1 4; true", *run[-2:])
    assert "FAILED: build (time)" in ended.splitlines()[-1]
