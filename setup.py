"""Build the shared library with CMake, and put it in the package."""

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
# All Pythons and ways to install share this folder, because the library depends on
# neither.
BUILD = ROOT / "build" / "native"
INSTALLED = BUILD / "installed"
KEPT_COMMIT = "COMMIT"  # the file in which a source distribution stores its commit
LIBRARY = "libgluon_syncbn"


def mpi_wrapper():
    """Return the MPI compiler wrapper: GLUON_SYNCBN_MPICXX, the environment's, or any.

    An isolated build puts an MPICH of its own first on PATH. It must not be used if the
    package will run with another MPI.
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
    """Return the commit of this checkout, with "-dirty" if tracked files differ.

    A source distribution has it in a file. Return "" if it is unknown.
    """
    kept = ROOT / KEPT_COMMIT
    if kept.exists():
        return kept.read_text(encoding="utf-8").strip()
    if not (ROOT / ".git").exists():
        return ""  # git would answer for a checkout around this folder
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.check_output([*git, "--exclude=*"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def check_compiler():
    """Exit with an error if there is no compiler."""
    names = "c++", "g++", "clang++"
    chosen = {"CXX", "CMAKE_TOOLCHAIN_FILE"} & os.environ.keys()
    if not chosen and not any(map(shutil.which, names)):
        sys.exit(
            "building gluon_syncbn needs a C++ compiler such as g++, but PATH has none "
            f"of {', '.join(names)}. Install one, or a wheel of gluon_syncbn that was "
            "built elsewhere (docs/design/gpus.md#build-a-wheel)."
        )


def cmake(*arguments):
    """Run CMake. pip shows its output after a failure, and always with -v."""
    command = ["cmake", *map(str, arguments)]
    try:
        status = subprocess.call(command)
    except OSError as error:
        sys.exit(
            f"building gluon_syncbn needs CMake and ninja ({error}). pip installs them "
            "for the build, unless it runs with --no-build-isolation."
        )
    if status:
        sys.exit(f"building gluon_syncbn failed in `{' '.join(command)}`")


def build_libraries():
    """Build into INSTALLED.

    Object files of earlier builds are reused. CMake's cache is not, because it has the
    paths of tools, and the tools of an isolated build no longer exist.
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
        stamp = f"-DGLUON_SYNCBN_COMMIT={commit()}"
        cmake("-S", ROOT / "src", "-B", BUILD, "-G", "Ninja", stamp, *mpi)
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
        shutil.copyfile(INSTALLED / target.name, target)


class AnyPythonWheel(bdist_wheel):
    """The wheel is for one platform, but for every Python 3.

    Its build tag shows what was built, `1cuda.75.80.90` or `0cpu`, because pip without
    -v shows nothing else. In a folder of wheels pip prefers the former.
    """

    def run(self):
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        self.run_command("build")
        self.skip_build = True
        is_cross_compiled = not self.get_tag()[2].endswith(platform.machine())
        self.build_number = "0cpu" if is_cross_compiled else build_tag()
        super().run()

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class SourcesWithCommit(sdist):
    """The files of MANIFEST.in, and a file with the commit."""

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


# The field of PEP 639, which setuptools below 77, the newest for Python 3.8, lacks.
LICENSE = "license_expression" if setuptools.__version__ >= "77" else "license"
setup(
    **{LICENSE: "Apache-2.0"},
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
