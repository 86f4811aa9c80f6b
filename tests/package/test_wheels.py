"""The source distribution and its wheel; scripts/wheels.sh tries what it makes."""

import email
import subprocess
import sys
import tarfile
import zipfile

import pytest
from support.checkout import Checkout
from support.helpers import ROOT, run_python, run_tool

import gluon_syncbn

SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/wheels/*.sh")])
MAKE_SDIST = (
    "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
)
COMMIT = """
import sys
sys.path.remove("")  # or else the checkout is imported
import gluon_syncbn
print(gluon_syncbn.features()["version"], gluon_syncbn.features()["commit"])
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_name_no_server(script):
    run_tool("bash", "-n", script)
    assert "://" not in script.read_text(encoding="utf-8")


# ----------------------------------------------------------- the source distribution


@pytest.fixture(scope="module")
def setuptools(tmp_path_factory):
    """A Python with what the build's isolation has of setuptools."""
    folder = tmp_path_factory.mktemp("setuptools")
    run_tool(sys.executable, "-m", "venv", folder)
    run_tool(folder / "bin/pip", "install", "--quiet", "setuptools>=64,<81", "wheel")
    return folder / "bin/python"


@pytest.fixture
def checkout(tmp_path):
    """A copy of the tree, committed into a repository of its own."""
    checkout = Checkout(tmp_path)
    git(checkout, "init", "--quiet")
    git(checkout, "add", ".")
    name = "-c", "user.name=a test", "-c", "user.email=test@localhost"
    git(checkout, *name, "commit", "--quiet", "--message", "all")
    return checkout


def git(checkout, *arguments):
    return run_tool("git", "-C", checkout.root, *arguments).strip()


def make_sdist(python, source, folder):
    """Makes it from the folder `source`, unpacks it into `folder`; returns its root."""
    subprocess.run(
        [str(python), "-c", MAKE_SDIST, str(folder)],
        cwd=source,
        check=True,
        stdout=subprocess.PIPE,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder)
    return folder / archive.name[: -len(".tar.gz")]


def files_below(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def commit_of(sdist):
    return (sdist / "COMMIT").read_text().strip()


@pytest.mark.full
def test_a_source_distribution_holds_all_sources_and_their_commit(
    tmp_path, checkout, setuptools
):
    head = git(checkout, "rev-parse", "HEAD")
    sdist = make_sdist(setuptools, checkout.root, tmp_path)
    for name in "src", "gluon_syncbn":
        assert files_below(sdist / name) == files_below(checkout.root / name)
    assert commit_of(sdist) == head
    metadata = email.message_from_string((sdist / "PKG-INFO").read_text())
    assert metadata["Version"] == gluon_syncbn.__version__

    # Nothing of git is left, and the next one knows it nevertheless.
    again = make_sdist(setuptools, sdist, tmp_path / "again")
    assert commit_of(again) == head

    # Changed files are no commit.
    (checkout.root / "src/CMakeLists.txt").write_text("")
    changed = make_sdist(setuptools, checkout.root, tmp_path / "changed")
    assert commit_of(changed) == f"{head}-dirty"


@pytest.mark.full
def test_a_folder_in_another_projects_checkout_has_no_commit(
    tmp_path, checkout, setuptools
):
    inner = checkout.root / "third_party"
    inner.mkdir()
    for name in "setup.py", "pyproject.toml", "README.md", "gluon_syncbn":
        (checkout.root / name).rename(inner / name)
    assert commit_of(make_sdist(setuptools, inner, tmp_path)) == ""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_source_distribution_builds_by_itself(tmp_path, checkout, setuptools):
    head = git(checkout, "rev-parse", "HEAD")
    make_sdist(setuptools, checkout.root, tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    wheel = "wheel", "--no-deps", "--wheel-dir", tmp_path, archive
    # With no MPI beside this Python and on PATH, the isolated build takes its own.
    environment = {"GLUON_SYNCBN_CUDA": "0", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    status, output = checkout.pip(*wheel, python=setuptools, **environment)
    assert status == 0, output[-5000:]
    (file,) = tmp_path.glob("*.whl")
    assert file.name.startswith(f"gluon_syncbn-{gluon_syncbn.__version__}-0cpu-py3-")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
    modules = {f for f in files_below(ROOT / "gluon_syncbn") if f.endswith(".py")}
    installed = files_below(tmp_path / "site" / "gluon_syncbn")
    assert installed - {"libgluon_syncbn_mpi.so"} == modules | {"libgluon_syncbn.so"}
    for library in (tmp_path / "site").rglob("*.so"):
        assert "build-env" not in run_tool("readelf", "-d", library)  # it is gone
    features = run_python(COMMIT, PYTHONPATH=str(tmp_path / "site"))
    assert features.stdout == f"{gluon_syncbn.__version__} {head}\n", features.stderr
