"""The output of ``python -m gluon_syncbn``, and errors when the library is loaded."""

import _ctypes
import re
import shutil
import sys
from pathlib import Path

import gluon_syncbn
from gluon_syncbn import __main__, installation
from gluon_syncbn.layer import native_operator
from gluon_syncbn.native import library

import mxnet as mx
import pytest
from support.helpers import ROOT, run_python, run_tool


def test_it_reports_versions_devices_and_checks():
    output = run_tool(sys.executable, "-m", "gluon_syncbn", timeout=120)
    features = gluon_syncbn.features()
    assert f"gluon_syncbn {gluon_syncbn.__version__}, MXNet {mx.__version__}" in output
    assert f"instruction_set: {features['instruction_set']}" in output
    assert f"commit: {features['commit'] or 'none'}\n" in output
    assert f"library: {features['library']}" in output
    reason = native_operator.missing()
    assert f"native operator: {'no' if reason else 'yes'}" in output
    assert reason in output
    assert re.search(r"^devices: \d+ CPU cores, ", output, re.M)
    rows = re.findall(r"^ok +cpu\(0\), cpu\(1\) +\w+ +float(?:32|64) ", output, re.M)
    assert len(set(rows)) == 4
    assert output.endswith("\nAll checks passed.\n")


def test_it_prints_the_causes_of_a_wait(capsys):
    assert __main__.main(["hang"]) == 0
    text = capsys.readouterr().out
    page = (ROOT / "docs/guides/hang.md").read_text()
    assert text.splitlines()[2] in page and "GLUON_SYNCBN_TIMEOUT" in text
    assert "allow_plain_loop(net)" in text and "devices disagree" not in text
    assert "](" not in text and "![" not in text  # no Markdown links, no pictures


def test_the_import_of_a_clone_that_was_not_built_is_an_error(tmp_path, monkeypatch):
    """Python in a clone imports the clone, even if the package is installed."""
    shutil.copytree(
        Path(gluon_syncbn.__file__).parent,
        tmp_path / "gluon_syncbn",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    monkeypatch.chdir(tmp_path)
    run = run_python("import gluon_syncbn")
    *_, sentence = run.stderr.splitlines()
    assert sentence.startswith("ImportError: ")
    assert str(tmp_path / "gluon_syncbn") in sentence


@pytest.mark.parametrize(
    "words, content",
    [
        ("ELF", b"\1" * 100),
        # _ctypes stands for a library that was built from other sources.
        ("other sources", Path(_ctypes.__file__).read_bytes()),
    ],
    ids=["bytes", "of other sources"],
)
def test_a_wrong_library_is_not_loaded(words, content, tmp_path, monkeypatch):
    file = tmp_path / "wrong.so"
    file.write_bytes(content)
    monkeypatch.setenv("GLUON_SYNCBN_LIBRARY", str(file))
    with pytest.raises(ImportError, match=rf"wrong.so.*{words}.*`pip"):
        library.load.__wrapped__()


def test_a_path_that_is_too_long_is_an_import_error(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_LIBRARY", "x" * 300)
    with pytest.raises(ImportError, match="does not exist"):
        library.load.__wrapped__()


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_INSTRUCTION_SET", "avx9000")
    pattern = "GLUON_SYNCBN_INSTRUCTION_SET.*'avx2'.*'avx512'.*'avx9000'"
    with pytest.raises(ValueError, match=pattern):
        library.load.__wrapped__()


def test_a_library_with_other_types_is_refused(tmp_path, monkeypatch):
    """A function that is called with wrong types would corrupt memory."""
    changed = tmp_path / "library.py"
    changed.write_text(Path(library.__file__).read_text() + "\n")
    monkeypatch.setenv("GLUON_SYNCBN_LIBRARY", str(library.path()))
    monkeypatch.setattr(library, "__file__", str(changed))
    with pytest.raises(ImportError, match="other sources"):
        library.load.__wrapped__()


def test_a_wrong_result_is_found(monkeypatch, capsys):
    step = installation.step

    def slightly_wrong(*arguments):
        results = step(*arguments)
        results["the running variance"].flat[-1] *= 1.001
        return results

    monkeypatch.setattr(installation, "step", slightly_wrong)
    assert __main__.main([]) == 1
    output, error = capsys.readouterr()
    assert "error: the running variance is wrong on cpu(0) and cpu(1), imp" in error
    assert "passed" not in output
