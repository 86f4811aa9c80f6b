"""Builds the shared library with CMake, and puts it in the package."""

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError
from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent.resolve()
# One folder for every Python and for every way to install, so that nothing is compiled
# twice: the library depends on none of that.
BUILD = ROOT / "build" / "native"
INSTALLED = BUILD / "installed"
# Written into a source distribution, which has no git to ask.
KEPT_COMMIT = "COMMIT"
LIBRARY = "libgluon_syncbn"


def mpi_wrapper():
    """The MPI compiler wrapper: the one that is asked for, of the environment, or any.

    An isolated build puts an MPICH of its own first on PATH, which must not win over
    the one that the package is going to run with.
    """
    asked = os.environ.get("GLUON_SYNCBN_MPICXX")
    if asked:
        return asked
    beside = Path(sys.executable).with_name("mpicxx")
    if beside.exists():
        return str(beside)
    isolated = Path(next((p for p in sys.path if "pip-build-env" in p), os.devnull))
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    own = [f for f in folders if isolated.parts[:4] != Path(f).parts[:4]]
    return shutil.which("mpicxx", path=os.pathsep.join(own)) or shutil.which("mpicxx")


def commit():
    """The commit of this checkout, with "-dirty" where tracked files differ from it.

    A source distribution keeps the one that it was made of. Empty where nobody knows.
    """
    kept = ROOT / KEPT_COMMIT
    if kept.exists():
        return kept.read_text(encoding="utf-8").strip()
    if not (ROOT / ".git").exists():
        return ""  # git would tell of a checkout around this folder
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.check_output([*git, "--exclude=*"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def check_compiler():
    """Ends the build in one sentence where CMake would take thirty lines."""
    names = "c++", "g++", "clang++"
    chosen = {"CXX", "CMAKE_TOOLCHAIN_FILE"} & os.environ.keys()
    if not chosen and not any(map(shutil.which, names)):
        sys.exit(
            "building gluon_syncbn needs a C++ compiler such as g++, but PATH has none "
            f"of {', '.join(names)}: install one, or a wheel of gluon_syncbn, which is "
            "built on a machine that has one (docs/guides/install.md#wheels)"
        )


def cmake(*arguments):
    """Runs CMake, whose output `pip install -v` shows; a failure tells its reason."""
    command = ["cmake", *map(str, arguments)]
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",  # a compiler may print what the locale lacks
        )
    except OSError as error:
        sys.exit(
            f"building gluon_syncbn needs CMake and ninja ({error}): pip brings them, "
            "but with --no-build-isolation they have to be installed"
        )
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.strip())
    if process.wait() != 0:
        # CMake's errors are paragraphs, a compiler's are lines.
        error = re.compile(r"\b([Ee]rror|fatal)\b")
        first = next((n for n, s in enumerate(lines) if error.search(s)), 0)
        reason = " ".join(filter(None, lines[first : first + 8]))
        sys.exit(f"building gluon_syncbn failed in `{' '.join(command)}`: {reason}")


def build_libraries():
    """Builds what is not built yet, and leaves it in INSTALLED.

    Objects of earlier builds stay: ninja compiles again what has another command,
    source or header. Nothing else of theirs does, because the tools that they knew may
    be gone, as those of an isolated build are.
    """
    check_compiler()
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (BUILD / "CMakeCache.txt").unlink(missing_ok=True)
        for folder in (INSTALLED, *BUILD.glob("CMakeFiles/[0-9]*")):
            shutil.rmtree(folder, ignore_errors=True)
        wrapper = mpi_wrapper()
        mpi = [f"-DMPI_CXX_COMPILER={wrapper}"] if wrapper else []
        if wrapper and Path(tempfile.gettempdir()) in Path(wrapper).parents:
            mpi += ["-DGLUON_SYNCBN_MPI_IS_TEMPORARY=ON"]
        defined = "-DCMAKE_BUILD_TYPE=Release", f"-DGLUON_SYNCBN_COMMIT={commit()}"
        cmake("-S", ROOT / "src", "-B", BUILD, "-G", "Ninja", *defined, *mpi)
        cmake("--build", BUILD)
        cmake("--install", BUILD, "--prefix", INSTALLED)


class CMakeBuild(build_ext):
    """One CMake project instead of setuptools' own compiler calls."""

    def get_ext_filename(self, fullname):
        # Not a Python module: ctypes loads it, whatever the Python version.
        return f"{Path(*fullname.split('.'))}.so"

    def build_extensions(self):
        build_libraries()
        super().build_extensions()

    def build_extension(self, extension):
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if extension.optional and not (INSTALLED / target.name).exists():
            raise CompileError(f"no working MPI was found, so no {target.name}")
        content = (INSTALLED / target.name).read_bytes()
        # native/library.py compares this sum before it loads the library.
        seal = b"gluon_syncbn" + zlib.crc32(content).to_bytes(4, "little")
        target.write_bytes(content + seal)


class AnyPythonWheel(bdist_wheel):
    """The library is for one platform, but for every Python 3.

    The wheel's name tells what is in it, because pip without -v says nothing else of a
    build: `1cuda.75.80.90` or `0cpu`, of which the former wins in a folder of wheels.
    """

    def run(self):
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        self.run_command("build")
        self.skip_build = True
        self.build_number = build_tag()
        super().run()

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class SourcesWithCommit(sdist):
    """What MANIFEST.in lists, and the commit that it is."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        Path(base_dir, KEPT_COMMIT).write_text(f"{commit()}\n", encoding="utf-8")


def build_tag():
    library = ctypes.CDLL(str(INSTALLED / f"{LIBRARY}.so"))
    library.gluon_syncbn_cuda_architectures.restype = ctypes.c_char_p
    library.gluon_syncbn_cuda_missing.restype = ctypes.c_char_p
    architectures = library.gluon_syncbn_cuda_architectures().decode().split()
    if architectures:
        return ".".join(["1cuda", *(a[:-5] for a in architectures if "real" in a)])
    broken = b"does not work" in library.gluon_syncbn_cuda_missing()
    return "0cpu.nvcc_does_not_work" if broken else "0cpu"


setup(
    ext_modules=[
        Extension(f"gluon_syncbn.{LIBRARY}", sources=[]),
        Extension(f"gluon_syncbn.{LIBRARY}_mpi", sources=[], optional=True),
    ],
    cmdclass={
        "build_ext": CMakeBuild,
        "bdist_wheel": AnyPythonWheel,
        "sdist": SourcesWithCommit,
    },
)
