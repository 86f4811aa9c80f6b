"""Type annotations: all public functions have them, and mypy finds them consistent."""

import ast
import subprocess
import sys

import pytest
from support.helpers import ROOT

pytest.importorskip("mypy", reason="mypy is not installed")


def public_functions(node):
    """Functions and methods without a leading underscore, and constructors."""
    for child in node.body:
        is_public = getattr(child, "name", "_")[0] != "_"
        if isinstance(child, ast.ClassDef) and is_public:
            yield from public_functions(child)
        elif isinstance(child, ast.FunctionDef):
            if is_public or child.name == "__init__":
                yield child


def test_public_functions_are_annotated():
    """That all arguments are, where the result is, mypy sees (pyproject.toml)."""
    for file in (ROOT / "gluon_syncbn").rglob("*.py"):
        for function in public_functions(ast.parse(file.read_text("utf-8"))):
            assert function.returns, f"{function.name} in {file}"


def test_mypy_finds_nothing_but_knows_the_signatures(tmp_path):
    """With settings that check nothing, it would not see the mistake."""
    program = tmp_path / "program.py"
    program.write_text("import gluon_syncbn\ngluon_syncbn.set_timeout([1])\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, "gluon_syncbn"]
    run = subprocess.run(
        [*command, program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    errors = [line for line in run.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, run.stdout + run.stderr
    assert 'incompatible type "list[int]"; expected "float"' in errors[0]
