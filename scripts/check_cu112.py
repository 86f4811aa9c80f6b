"""Runs the CPU test suite inside mxnet-cu112 on a machine without a GPU.

The wheel for GPUs wants CUDA's libraries to be loaded. Here each is replaced by a stub
with the functions that libmxnet.so takes from it, which tell of no driver and no
device. What this proves: the very library that is in the package loads beside a CUDA
runtime of another version, and passes the suite. Not part of every test run, because
the wheel is large.

    python scripts/check_cu112.py                      # arguments go to pytest
    python scripts/check_cu112.py tests/test_modes.py -x

The environment and the stubs are kept in build/cu112; VENV chooses another environment,
which has to hold mxnet-cu112 and the test requirements.
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cu112"
WHEEL = "mxnet-cu112==1.9.1"

# Libraries whose functions carry no version, by how these begin.
PREFIXES = {
    "libcuda.so.1": r"cu[A-Z]",
    "libcudnn.so.8": "cudnn",
    "libnccl.so.2": "nccl",
    "libnvrtc.so.11.2": "nvrtc",
    "libnvToolsExt.so.1": "nvtx",
    "libcudart.so.11.0": "(__)?cuda",
    "libcublas.so.11": "cublas",
    "libcufft.so.10": "cufft",
    "libcurand.so.10": "curand",
    "libcusolver.so.11": "cusolver",
}
# No driver, no device, and no pointer where a text is expected.
ANSWERS = {
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int* v) { *v = 0; return 0; }",
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int* n) { *n = 0; return 100; }",
}
TEXTS = r".*(GetErrorString|GetErrorName)"
NO_DEVICE = 100  # cudaErrorNoDevice


def make_environment():
    """A Python with mxnet-cu112 and what the tests need; returns its interpreter."""
    folder = Path(os.environ.get("VENV", BUILD / "venv"))
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        lines = (ROOT / "requirements.txt").read_text().splitlines()
        others = [line for line in lines if re.match(r"(?!mxnet)\w", line)]
        pip = [python, "-m", "pip", "install", "--quiet", WHEEL, *others]
        subprocess.run(pip, check=True)
    return python


def libmxnet(python):
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.check_output([python, "-c", code], text=True).strip()
    return Path(folder) / "mxnet" / "libmxnet.so"


def wanted_functions(library):
    """Functions that `library` takes from each of CUDA's, and which carry versions."""
    symbols = subprocess.check_output(
        ["nm", "-D", "--undefined-only", library], text=True
    )
    wanted = {name: set() for name in PREFIXES}
    versioned = set()
    for line in symbols.splitlines():
        name, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if version in wanted:
            wanted[version].add(name)
            versioned.add(version)
        elif not version:
            owners = [lib for lib, start in PREFIXES.items() if re.match(start, name)]
            if owners:
                wanted[owners[0]].add(name)
    return wanted, versioned


def make_stub(library, functions, versioned, folder):
    """Compiles a shared library of this name whose functions all fail."""
    lines = []
    for name in sorted(functions):
        if re.match(TEXTS, name):
            lines.append(
                f'const char* {name}(void) {{ return "a stub of {library}"; }}'
            )
        else:
            answer = f"long {name}(void) {{ return {NO_DEVICE}; }}"
            lines.append(ANSWERS.get(name, answer))
    source = folder / f"{library}.c"
    source.write_text("\n".join(lines) + "\n")
    command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
    if versioned:
        script = folder / f"{library}.map"
        script.write_text(f"{library} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", folder / library, source], check=True)


def main():
    python = make_environment()
    stubs = BUILD / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    wanted, versioned = wanted_functions(libmxnet(python))
    for library, functions in wanted.items():
        make_stub(library, functions, library in versioned, stubs)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(stubs),
        "PYTHONPATH": str(ROOT),
    }
    code = (
        "import mxnet, gluon_syncbn; "
        "assert mxnet.runtime.Features().is_enabled('CUDA'); "
        "print(mxnet.__version__, 'with CUDA;', gluon_syncbn.features())"
    )
    subprocess.run([python, "-c", code], env=environment, cwd=ROOT, check=True)
    tests = [python, "-m", "pytest", "-q", *sys.argv[1:]]
    sys.exit(subprocess.run(tests, env=environment, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
