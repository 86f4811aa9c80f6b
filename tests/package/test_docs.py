"""Run the code of pages, and find public names that the reference lacks."""

import importlib.util
import inspect
import sys
from pathlib import Path
from unittest import SkipTest

import gluon_syncbn
from gluon_syncbn.compat import IS_GLUON_2

import pytest
import sybil.parsers.markdown as pages
import sybil.parsers.rest as docstrings
from support.helpers import ROOT, run_tool
from support.mpi import launcher, needs_mpi
from sybil import Sybil
from sybil.document import PythonDocStringDocument


class FileOfCpp(pages.CodeBlockParser):
    """Writes a block of C++ to the file that its first line names."""

    language = "cpp"

    def evaluate(self, example):
        name = example.parsed.split("\n", 1)[0].split()[1]
        Path(name).write_text(example.parsed)


SYBIL = Sybil([pages.PythonCodeBlockParser(), FileOfCpp(), pages.SkipParser()])
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*/*.md"))]
PAGES = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


def needs_processes(example):
    return "distributed.init()" in str(example.parsed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks run in their order. Another test runs programs for several processes."""
    monkeypatch.chdir(tmp_path)
    document, skipped, ran = SYBIL.parse(page), [], 0
    document.namespace["IS_GLUON_2"] = IS_GLUON_2
    document.namespace["lacks"] = lambda name: not importlib.util.find_spec(name)
    for example in document:
        if not needs_processes(example):
            try:
                example.evaluate()
                ran += 1
            except SkipTest as reason:
                skipped.append(str(reason))
    if skipped:
        pytest.skip(f"{ran} blocks ran, left out: {', '.join(skipped)}")


def programs():
    """Return programs for several processes that do not use a kvstore (test_training).

    Programs that shut down come last.
    """
    modules = Sybil(
        [docstrings.PythonCodeBlockParser()],
        document_types={".py": PythonDocStringDocument},
    )
    found = [SYBIL.parse(page) for page in PAGES]
    found += [modules.parse(path) for path in ROOT.glob("gluon_syncbn/**/*.py")]
    examples = [e for document in found for e in document]
    texts = [str(e.parsed) for e in examples if needs_processes(e)]
    texts = [t for t in texts if "dist_sync" not in t and "DMLC_" not in t]
    return sorted(texts, key=lambda text: "shutdown()" in text)


@needs_mpi
def test_programs_for_several_processes_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    files = []
    for number, text in enumerate(programs()):
        files.append(f"{number}.py")
        Path(files[-1]).write_text(text)
    assert len(files) > 4
    one_by_one = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)"
    run_tool(*launcher(2), sys.executable, "-c", one_by_one, *files, timeout=200)


def test_public_classes_and_functions_are_in_the_reference_with_examples():
    reference = "".join(p.read_text("utf-8") for p in ROOT.glob("docs/api/*.md"))
    modules = gluon_syncbn, gluon_syncbn.distributed, gluon_syncbn.gluoncv
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert f"{name}\n" in reference, f"{name} of {module.__name__}"
                assert "\nExamples\n--------\n" in inspect.getdoc(value), name
