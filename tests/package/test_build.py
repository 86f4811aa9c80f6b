"""Building: a source distribution and its wheel, and one checkout again and again.

A build depends on nothing that an earlier one left but objects, and says what it has
built. scripts/wheels.sh tries the wheels that it makes.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import gluon_syncbn

import pytest
from support.helpers import ROOT, run_python, run_tool

SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/wheels/*.sh")])
MAKE_SDIST = (
    "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
)
FEATURES = """
import sys
sys.path.remove("")  # or else the checkout is imported
import gluon_syncbn
features = gluon_syncbn.features()
print(features["version"], features["commit"], features["cuda_missing"], sep="|")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_name_no_server(script):
    run_tool("bash", "-n", script)
    assert "://" not in script.read_text(encoding="utf-8")


def test_without_a_compiler_the_build_ends_in_one_sentence(tmp_path):
    chosen = "CXX", "CMAKE_TOOLCHAIN_FILE"
    environment = {k: v for k, v in os.environ.items() if k not in chosen}
    # An isolated build has the package wheel, which this environment may lack.
    stub = tmp_path / "wheel" / "bdist_wheel.py"
    stub.parent.mkdir()
    stub.write_text("from setuptools import Command as bdist_wheel")
    folders = "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env={**environment, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    (*_, text) = result.stderr.splitlines()
    assert text.startswith("building gluon_syncbn needs a C++ compiler such as g++, bu")
    assert "install one, or a wheel of gluon_syncbn" in text


# ---- copies of the checkout ----------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A copy of the tree, committed into its own repository."""
    root = tmp_path / "checkout"
    listed = "git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"
    for name in run_tool(*listed).splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    name = "-c", "user.name=a test", "-c", "user.email=test@localhost"
    git(root, *name, "commit", "--quiet", "--message", "all")
    return root


def git(root, *arguments):
    return run_tool("git", "-C", root, *arguments).strip()


def pip(root, *arguments, python=sys.executable, **environment):
    """Runs pip in an isolation; returns its exit status and its output."""
    result = subprocess.run(
        [str(python), "-m", "pip", *map(str, arguments)],
        cwd=root,
        env={**os.environ, "PIP_NO_COMPILE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def features_of(folder):
    """[version, commit, why there is no CUDA] of the package in a folder."""
    return run_python(FEATURES, PYTHONPATH=str(folder)).stdout.strip().split("|")


def files_below(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_one_checkout_is_built_again_and_again(tmp_path, checkout):
    def install(name, **environment):
        target = tmp_path / name
        options = "--verbose", "--no-deps", "--target", target, "."
        status, output = pip(checkout, "install", *options, **environment)
        assert status == 0, output[-5000:]
        missing = features_of(target)[2]
        assert f"gluon_syncbn: builds for the CPU alone: {missing}\n" in output
        return target / "gluon_syncbn", missing, output

    def compiled():
        folder = checkout / "build/native/CMakeFiles/gluon_syncbn_objects.dir"
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.o")}

    _, missing, output = install("1", GLUON_SYNCBN_CUDA="0")
    assert missing == "GLUON_SYNCBN_CUDA=0 was set" and "-0cpu-py3-none-" in output
    objects = compiled()
    assert len(objects) > 10

    # A module that was removed in between stays away; nothing is compiled again.
    (checkout / "gluon_syncbn/parallel/plain_loop.py").unlink()
    (checkout / "gluon_syncbn/__init__.py").write_text(
        "from .native.library import *\n"
    )
    package, _, _ = install("2", GLUON_SYNCBN_CUDA="0")
    assert not (package / "parallel/plain_loop.py").exists()
    assert compiled() == objects

    _, missing, output = install("3", CUDACXX="/no/nvcc", GLUON_SYNCBN_CUDA="")
    assert missing.lower() == "/no/nvcc does not work: no such file or directory"
    assert "-0cpu.nvcc_does_not_work-py3-none-" in output

    # An error is CMake's own.
    status, output = pip(checkout, "install", "--no-deps", ".", CXX="/no/compiler")
    assert status != 0 and "CMake Error at " in output.split("failed in `")[1]
    assert "/no/compiler" in output.split("failed in `")[1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_source_distribution_knows_its_commit_and_builds(tmp_path, checkout):
    python = tmp_path / "venv/bin/python"
    run_tool(sys.executable, "-m", "venv", tmp_path / "venv")
    run_tool(python, "-m", "pip", "install", "-q", "setuptools>=64,<81", "wheel")

    def make_sdist(source, name):
        """Makes it from the folder `source`; returns the archive and its root."""
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run(
            [str(python), "-c", MAKE_SDIST, str(folder)],
            cwd=source, check=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder)
        return archive, folder / archive.name[: -len(".tar.gz")]

    head = git(checkout, "rev-parse", "HEAD")
    archive, sdist = make_sdist(checkout, "sdist")
    for name in "src", "gluon_syncbn":
        assert files_below(sdist / name) == files_below(checkout / name)
    # The next one has no git to ask, and changed files are no commit.
    assert (make_sdist(sdist, "again")[1] / "COMMIT").read_text().strip() == head
    (checkout / "src/CMakeLists.txt").write_text("")
    changed = make_sdist(checkout, "changed")[1] / "COMMIT"
    assert changed.read_text().strip() == f"{head}-dirty"

    # With no MPI beside this Python and on PATH, the isolated build brings one.
    wheel = "wheel", "--no-deps", "--wheel-dir", tmp_path, archive
    environment = {"GLUON_SYNCBN_CUDA": "0", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    status, output = pip(checkout, *wheel, python=python, **environment)
    assert status == 0, output[-5000:]
    version = gluon_syncbn.__version__
    (file,) = tmp_path.glob(f"gluon_syncbn-{version}-0cpu-py3-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
    modules = {f for f in files_below(ROOT / "gluon_syncbn") if f.endswith(".py")}
    installed = files_below(tmp_path / "site" / "gluon_syncbn")
    assert installed - {"libgluon_syncbn_mpi.so"} == modules | {"libgluon_syncbn.so"}
    for library in (tmp_path / "site").rglob("*.so"):
        assert "build-env" not in run_tool("readelf", "-d", library)  # it is gone
    assert features_of(tmp_path / "site")[:2] == [version, head]
