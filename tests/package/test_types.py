"""Type annotations: all public functions have them, and mypy finds them consistent."""

import ast
import importlib.util
import subprocess
import sys

import pytest
from support.helpers import ROOT

FILES = sorted((ROOT / "gluon_syncbn").rglob("*.py"))


def public_functions(node, prefix=""):
    """Functions and methods without a leading underscore, and constructors."""
    for child in ast.iter_child_nodes(node):
        is_public = getattr(child, "name", "_")[0] != "_"
        if isinstance(child, ast.ClassDef) and is_public:
            yield from public_functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            if is_public or child.name == "__init__":
                yield f"{prefix}{child.name}", child


def is_annotated(function):
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += filter(None, [arguments.vararg, arguments.kwarg])
    of_arguments = all(a.annotation for a in named if a.arg != "self")
    return of_arguments and function.returns is not None


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_public_functions_are_annotated(file):
    found = public_functions(ast.parse(file.read_text(encoding="utf-8")))
    assert [name for name, function in found if not is_annotated(function)] == []


def test_what_counts_as_annotated():
    text = "class A:\n    def __init__(self, x): ...\n    def f(self) -> int: ...\n"
    found = dict(public_functions(ast.parse(text + "def _g(): ...\ndef h(): ...")))
    assert {name: is_annotated(found[name]) for name in found} == {
        "A.__init__": False, "A.f": True, "h": False,
    }  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


def run_mypy(cache, *arguments):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    command = [sys.executable, "-m", "mypy", "--cache-dir", cache, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_mypy_finds_nothing(cache):
    run = run_mypy(cache, "gluon_syncbn")
    assert run.returncode == 0, run.stdout + run.stderr


def test_mypy_knows_the_signatures(cache):
    """With settings that check nothing, the test above could not fail."""
    code = "import gluon_syncbn\ngluon_syncbn.set_timeout([1])\n"
    run = run_mypy(cache, "-c", code)
    assert 'incompatible type "list[int]"; expected "float"' in run.stdout
