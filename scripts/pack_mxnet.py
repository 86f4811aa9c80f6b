"""Pack mxnet-cu112 for a machine with a GPU and Python, but without a network.

The archive contains MXNet without its code for GPUs (most of its size), the packages
that MXNet and the tests need, and stubs of CUDA's libraries. The stub of the runtime
gets memory and streams from the driver but launches no kernel of MXNet, so MXNet runs
on GPUs for which it has no kernels. A separate folder contains the emulated driver.
docs/design/gpus.md shows how to use the archive.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from check_gpu_wheel import EMULATED, make_stubs

# MXNet's code for CPUs is repetitive. A large dictionary packs 350 MB into 38 MB.
COMPRESSION = "xz --x86 --lzma2=preset=4,dict=256MiB"
PACKAGES = "numpy<2", "pytest==8.3.5", "setuptools<81"
SITE_CUSTOMIZE = "import setuptools  # provides distutils, which MXNet imports\n"


def install(wheel, version, site):
    """Install the wheel, its dependencies and PACKAGES for a version of Python."""
    target = ["--python-version", version, "--platform", "manylinux2014_x86_64"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *target]
    options = ["--only-binary=:all:", "--target", site]
    subprocess.run([*pip, *options, wheel, *PACKAGES], check=True)
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, help="where to write mxnet.tar.xz")
    parser.add_argument("--python", default="3.12", help="version on the GPU machine")
    parser.add_argument("--wheel", default="mxnet-cu112==1.9.1")
    options = parser.parse_args()
    folder = options.build / "mxnet"
    install(options.wheel, options.python, folder / "site")
    library = folder / "site/mxnet/libmxnet.so"
    stubs = make_stubs(library, folder / "stubs", EMULATED)
    (folder / "emulated").mkdir(exist_ok=True)
    (stubs / "libcuda.so.1").rename(folder / "emulated/libcuda.so.1")
    subprocess.run(["objcopy", "--remove-section=.nv_fatbin", library], check=True)
    archive = options.build / "mxnet.tar.xz"
    tar = ["tar", "-I", COMPRESSION, "-cf", archive, "-C", options.build, "mxnet"]
    subprocess.run(tar, check=True)


if __name__ == "__main__":
    main()
