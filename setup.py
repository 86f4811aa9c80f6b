"""Builds the shared library with CMake, and puts it in the package."""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from wheel.bdist_wheel import bdist_wheel

SOURCE = Path(__file__).parent.resolve() / "src"
LIBRARY = "libgluon_syncbn.so"


class CMakeBuild(build_ext):
    """One CMake project instead of setuptools' own compiler calls."""

    def get_ext_filename(self, fullname):
        # Not a Python module: ctypes loads it, whatever the Python version.
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, extension):
        build = Path(self.build_temp).resolve() / "native"
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", SOURCE, "-B", build, "-G", "Ninja"]
        configure += ["-DCMAKE_BUILD_TYPE=Release"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", build], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"building {LIBRARY} needs a C++17 compiler such as g++: {error}")
        self.copy_file(build / LIBRARY, target)


class AnyPythonWheel(bdist_wheel):
    """The library is for one platform, but for every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("gluon_syncbn.native", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
