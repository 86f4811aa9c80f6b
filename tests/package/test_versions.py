"""Versions: the package's own, and those of MXNet, of which it refuses others."""

import json
import re

import check_versions
import pytest
from support.helpers import ROOT, run_python, run_tool

import gluon_syncbn


def import_beside(folder, version):
    """Imports the package where `version` is all that there is of MXNet."""
    (folder / "mxnet.py").write_text(f"__version__ = {version!r}")
    path = f"{folder}:{ROOT}"
    return run_python("import gluon_syncbn", PYTHONPATH=path).stderr.splitlines()[-1]


@pytest.mark.parametrize("version", ["2.0.0b1", "1.5.1.post0", "1.10.0", "?"])
def test_other_versions_are_refused_in_one_sentence(tmp_path, version):
    assert import_beside(tmp_path, version) == (
        "ImportError: gluon_syncbn works with MXNet 1.6 to 1.9.1, but the installed "
        f"mxnet is {version}; `pip install mxnet==1.9.1` installs one that it works "
        "with"
    )


def test_a_missing_mxnet_is_named_with_its_cure(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise ModuleNotFoundError('no', name='mxnet')")
    path = f"{tmp_path}:{ROOT}"
    for program in "import gluon_syncbn", "import gluon_syncbn.__main__":
        text = run_python(program, PYTHONPATH=path).stderr.splitlines()[-1]
        assert text.startswith("ModuleNotFoundError: gluon_syncbn needs MXNet, which")
        assert text.endswith(
            "`pip install mxnet==1.9.1 'numpy<1.24'`, or mxnet-cu112 for GPUs"
        )


@pytest.mark.parametrize("version", ["1.6.0", "1.7.0.post2", "1.9.1", "1.9.0b20210101"])
def test_versions_in_between_are_not(tmp_path, version):
    assert "works with" not in import_beside(tmp_path, version)


def test_the_page_shows_what_the_matrix_gave():
    rows = json.loads(check_versions.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert check_versions.table(rows) in check_versions.PAGE.read_text(encoding="utf-8")
    for row in rows:
        expected = "refused" if row["mxnet"].startswith("2.") else "passed"
        assert row["outcome"] == expected, row
    assert {row["mxnet"] for row in rows} == set(check_versions.MXNETS)
    assert {row["python"] for row in rows} == set(check_versions.PYTHONS)


def test_one_version_for_all():
    """setup.py and the documentation read the same file."""
    version = gluon_syncbn.__version__
    assert gluon_syncbn.features()["version"] == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert changes.startswith(f"# Changelog\n\n## {version}\n")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a checkout")
def test_the_commit_of_a_checkout_is_known():
    try:
        run_tool("git", "-C", ROOT, "rev-parse", "HEAD")
    except (AssertionError, OSError) as error:
        pytest.skip(f"git cannot tell the commit here: {error}")
    commit = gluon_syncbn.features()["commit"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)
