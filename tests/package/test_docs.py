"""The documentation: its code runs, its messages are real, its links lead somewhere.

Python blocks of a page run one after the other, with what a comment `<!-- setup` holds
before the first. A comment `<!-- tested: ... -->` before a block says what it needs.
"""

import doctest
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest
from support.helpers import ROOT, run_tool
from support.mpi import launcher, needs_mpi

import gluon_syncbn
from gluon_syncbn import distributed, monitor

DOCS = ROOT / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.glob("**/*.md")
    if "_build" not in path.parts
)
WITH_CODE = [
    page for page in PAGES if "```python" in (DOCS / page).read_text(encoding="utf-8")
]
BLOCK = re.compile(
    r"(?:<!-- tested: (?P<needs>\S+) -->\n\n)?```python\n(?P<code>.*?)```", re.S
)
NEEDS = {"GluonCV": "gluoncv", "onnx": "onnx"}


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, names = text_of(page), {"__name__": "page"}
    for code in re.findall(r"<!-- setup\n(.*?)-->", text, re.S):
        exec(code, names)
    for block in BLOCK.finditer(text):
        if block["needs"] in ("mpirun", "kvstore"):  # the latter by test_kvstore.py
            continue
        if block["needs"]:
            package = NEEDS[block["needs"]]
            pytest.importorskip(package, reason=f"{package} is not installed")
        if ">>>" in block["code"]:
            parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
            test = parser.get_doctest(block["code"], names, page, page, 0)
            assert runner.run(test, clear_globs=False).failed == 0
            names.update(test.globs)
        else:
            exec(compile(block["code"], page, "exec"), names)


def public():
    """Every public class and function with the name that it has in the reference."""
    for name in gluon_syncbn.__all__:
        value = getattr(gluon_syncbn, name)
        if callable(value):
            yield f"gluon_syncbn.{name}", value
    for name in distributed.__all__:
        yield f"gluon_syncbn.distributed.{name}", getattr(distributed, name)
    for name in gluon_syncbn.gluoncv.__all__:
        yield f"gluon_syncbn.gluoncv.{name}", getattr(gluon_syncbn.gluoncv, name)
    yield "gluon_syncbn.monitor.Waits", monitor.Waits


PUBLIC = dict(public())


def test_links_of_the_readme_lead_to_files():
    """Sphinx checks those of the site."""
    for link in re.findall(
        r"\]\(([^)#:]+)[^)]*\)", (ROOT / "README.md").read_text(encoding="utf-8")
    ):
        assert (ROOT / link).exists(), link


def programs():
    """Code that needs a process of its own, by the name of its page or function."""
    for page in PAGES:
        for block in BLOCK.finditer(text_of(page)):
            if block["needs"] == "mpirun":
                yield page, block["code"]
    for name, value in PUBLIC.items():
        text = inspect.getdoc(value) + "\n"
        for code in re.findall(CODE_OF_DOCSTRING, text):
            yield name, textwrap.dedent(code)


CODE_OF_DOCSTRING = r"\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)"
PROGRAMS = dict(programs())


def run_programs(names, tmp_path, monkeypatch, before=()):
    """One after the other in one process, each with names of its own."""
    assert names
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in names:
        Path(name.replace("/", "-")).write_text(PROGRAMS[name], encoding="utf-8")
    program = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)"
    files = [name.replace("/", "-") for name in names]
    run_tool(*before, sys.executable, "-c", program, *files, timeout=200)


@needs_mpi
def test_programs_for_several_processes_run(tmp_path, monkeypatch):
    names = [name for name, code in PROGRAMS.items() if "distributed.init()" in code]
    names.sort(key=lambda name: "shutdown()" in PROGRAMS[name])  # it is the last
    run_programs(names, tmp_path, monkeypatch, launcher(2))


def test_programs_for_gluoncv_run(tmp_path, monkeypatch):
    pytest.importorskip("gluoncv", reason="GluonCV is not installed")
    names = [name for name, code in PROGRAMS.items() if "distributed" not in code]
    run_programs(names, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    text = inspect.getdoc(PUBLIC[name])
    _, section = text.split("\nExamples\n--------\n")
    assert ">>> " in section or name in PROGRAMS


# Names, numbers and punctuation of a message, and the first words of its sentences.
VARIABLE = re.compile(r"\S*[\d_()=']\S*|[A-Z]\w*|\branks?\b|[,.;:\[]+")


def test_the_messages_of_hangs_are_real():
    """The words between the variables stand in the sources."""
    text = text_of("guides/hang.md")
    files = [*ROOT.glob("src/**/*.cc"), *ROOT.glob("gluon_syncbn/**/*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that are joined
    messages = re.findall(r"^```text\n(.*?)^```$", text, re.S | re.M)
    causes = re.findall(r"\*\*(?:Likely cause: |which )(.*?)\*\*", text, re.S)
    assert len(messages) > 20 and len(causes) == 17
    for message in messages + causes:
        phrases = [p.strip() for p in VARIABLE.split(" ".join(message.split()))]
        for phrase in phrases:
            assert len(phrase.split()) < 2 or phrase in source, message
        assert any(phrases), message


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as scripts/docs.sh does; a warning is an error."""
    pytest.importorskip("sphinx", reason="docs/requirements.txt is not installed")
    folder = tmp_path_factory.mktemp("site")
    run_tool(
        sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q",
        "-b", "html", "-d", folder / "doctrees", DOCS, folder / "html",
        timeout=250,
    )  # fmt: skip
    return folder / "html"


@pytest.mark.timeout(280)
def test_the_site_is_whole(site):
    """Sphinx has checked its links and anchors."""
    assert len(list(site.glob("**/*.html"))) > 25
    documented = (site / "genindex.html").read_text(encoding="utf-8")
    for name in PUBLIC:
        assert f"#{name}" in documented, f"{name} is not in the reference"


@pytest.mark.timeout(280)
def test_figures_link_to_themselves(site):
    page = (site / "benchmarks.html").read_text(encoding="utf-8")
    figures = re.findall(r'<a class="figure" href="(.*?)"><img ', page)
    assert len(figures) == page.count("<img ") > 4
    for file in figures:
        assert (site / file).exists(), file
