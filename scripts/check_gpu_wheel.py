"""Run tests with MXNet's wheel for GPUs on a machine without a GPU.

The wheel loads CUDA's libraries. The script replaces each of them with a stub, which
has the functions that libmxnet.so imports. It builds the stubs twice:

* with two GPUs emulated on the CPU (tests/cpp/emulated_cuda). The script builds our
  library with emulated kernels and runs tests/layer/test_gpu_contexts.py;
* without a driver and a device. The script runs the whole suite on CPU contexts,
  although MXNet was built with CUDA.

    python scripts/check_gpu_wheel.py                  # arguments go to the suite
    python scripts/check_gpu_wheel.py --wheel mxnet-cu110==1.9.1

The folder build/WHEEL has the environment and the stubs.
"""

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# How the names of each CUDA library's functions begin (regular expressions).
NAMES = "cudnn", "nccl", "nvrtc", "cublas", "cufft", "curand", "cusolver"
PREFIXES = {
    "libcuda": r"cu[A-Z]", "libcudart": "(__)?cuda", "libnvToolsExt": "nvtx",
    **{f"lib{name}": name for name in NAMES},
}  # fmt: skip
RETURNS_TEXT = r".*(GetErrorString|GetErrorName)"

EMULATION = ROOT / "tests/cpp/emulated_cuda"
NOT_SUPPORTED, NO_DEVICE = 801, 100  # values of cudaError_t
# Code of two stubs, and the status that their other functions return.
EMULATED = {
    "libcudart": ((EMULATION / "mxnet_runtime.c").read_text(), NOT_SUPPORTED),
    "libcuda": ((EMULATION / "driver.c").read_text(), NOT_SUPPORTED),
}
NO_RUNTIME = f"""
int cudaDriverGetVersion(int* version) {{ return *version = 0, 0; }}
int cudaGetDeviceCount(int* count) {{ return *count = 0, {NO_DEVICE}; }}
"""
NO_GPU = dict.fromkeys(PREFIXES, ("", NO_DEVICE))
NO_GPU["libcudart"] = NO_RUNTIME, NO_DEVICE

SHOW = """
import gluon_syncbn, mxnet
assert mxnet.runtime.Features().is_enabled("CUDA")
print(mxnet.__version__, "with CUDA;", gluon_syncbn.features())
"""


def make_environment(wheel, folder):
    venv.create(folder, with_pip=True)
    packages = wheel, "-r", ROOT / "requirements.txt"
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(pip, check=True)


def wanted_functions(library):
    """Return the functions that `library` imports from each CUDA library."""
    dynamic = subprocess.check_output(["readelf", "-d", library], text=True)
    command = ["nm", "-D", "--undefined-only", library]
    symbols = subprocess.check_output(command, text=True)
    names = [line.split()[-1].partition("@")[0] for line in symbols.splitlines()]
    return {
        needed: {name for name in names if re.match(PREFIXES[base], name)}
        for needed, base in re.findall(r"NEEDED.*\[((\w+)\.so.*)\]", dynamic)
        if base in PREFIXES
    }


def make_stub(library, functions, folder, codes):
    """Compile a stub. Functions without code in `codes` only return a status."""
    code, status = codes.get(library.split(".")[0], ("", 0))
    present = set(re.findall(r"^(?:int|const char\*) (\w+)\(", code, re.MULTILINE))
    lines = [code]
    for name in sorted(functions - present):
        if re.match(RETURNS_TEXT, name):
            text = f'"a stub of {library}"'
            lines.append(f"const char* {name}(void) {{ return {text}; }}")
        else:
            lines.append(f"long {name}(void) {{ return {status}; }}")
    source = folder / f"{library}.c"
    source.write_text("\n".join(lines) + "\n")
    # libmxnet.so imports some functions with a version, the name of their library. This
    # map gives all functions the version. Imports without a version also find them.
    script = folder / f"{library}.map"
    script.write_text(f"{library} {{ global: *; }};\n")
    options = f"-Wl,-soname,{library},--version-script={script}"
    command = ["gcc", "-w", "-shared", "-fPIC", options, "-o", folder / library]
    subprocess.run([*command, source], check=True)


def make_stubs(library, folder, codes):
    """Build a stub of each CUDA library that `library` loads; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, functions in wanted_functions(library).items():
        make_stub(name, functions, folder, codes)
    return folder


def make_emulated_library(build):
    options = ["-G", "Ninja", "-DGLUON_SYNCBN_BUILD_TESTS=ON"]
    subprocess.run(["cmake", "-S", ROOT / "src", "-B", build, *options], check=True)
    target = "gluon_syncbn_emulated"
    subprocess.run(["cmake", "--build", build, "--target", target], check=True)
    return build / f"lib{target}.so"


def run(python, stubs, tests, **variables):
    """Run pytest on `tests` with the stubs; return its status."""
    paths = {"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **paths, **variables}
    subprocess.run([python, "-c", SHOW], env=environment, cwd=ROOT, check=True)
    command = [python, "-m", "pytest", "-q", *tests]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheel", default="mxnet-cu112==1.9.1")
    options, tests = parser.parse_known_args()
    build = ROOT / "build" / options.wheel.split("=")[0]
    if not (build / "venv").exists():
        make_environment(options.wheel, build / "venv")
    python = build / "venv/bin/python"
    (library,) = build.glob("venv/lib/python*/site-packages/mxnet/libmxnet.so")
    emulated = run(
        python,
        make_stubs(library, build / "two_gpus", EMULATED),
        ["tests/layer/test_gpu_contexts.py"],
        GLUON_SYNCBN_LIBRARY=str(make_emulated_library(ROOT / "build" / "emulated")),
    )
    without = make_stubs(library, build / "no_gpu", NO_GPU)
    suite = run(python, without, tests)
    sys.exit(emulated or suite)


if __name__ == "__main__":
    main()
