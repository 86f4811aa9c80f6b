"""Builds the shared library with CMake, and puts it in the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError
from wheel.bdist_wheel import bdist_wheel

SOURCE = Path(__file__).parent.resolve() / "src"
# By the names of the extensions that setuptools knows; those of MPI may be missing.
LIBRARIES = {"native": "libgluon_syncbn.so", "mpi": "libgluon_syncbn_mpi.so"}


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


class CMakeBuild(build_ext):
    """One CMake project instead of setuptools' own compiler calls."""

    def get_ext_filename(self, fullname):
        # Not a Python module: ctypes loads it, whatever the Python version.
        *package, name = fullname.split(".")
        return str(Path(*package, LIBRARIES[name]))

    def build_extension(self, extension):
        build = Path(self.build_temp).resolve() / "native"
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", SOURCE, "-B", build, "-G", "Ninja"]
        configure += ["-DCMAKE_BUILD_TYPE=Release"]
        if mpi_wrapper():
            configure += [f"-DMPI_CXX_COMPILER={mpi_wrapper()}"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", build], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"building {target.name} needs a C++17 compiler like g++: {error}")
        if extension.optional and not (build / target.name).exists():
            raise CompileError(f"no working MPI was found, so no {target.name}")
        self.copy_file(build / target.name, target)


class AnyPythonWheel(bdist_wheel):
    """The library is for one platform, but for every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension("gluon_syncbn.native", sources=[]),
        Extension("gluon_syncbn.mpi", sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
