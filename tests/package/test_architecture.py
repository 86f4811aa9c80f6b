"""The wings of the package and the folders of src: imports and includes go down only.

Their order, and what each may import or include, stand in one place: for the wings the
table of docs/design/wings.md, for src that of CONTRIBUTING.md. An import inside of a
function counts as one at the top, and importing a module runs its packages too.
"""

import ast
import itertools
import re
from pathlib import Path

import pytest
from support.helpers import ROOT

PACKAGE = ROOT / "gluon_syncbn"
ABOVE = "above"  # public modules and the command: they may import all wings


def table(page, heading):
    """The last column, with this heading, of each row by the first one's name."""
    lines = page.read_text(encoding="utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if line.endswith(f"| {heading} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    cells = [row.strip("|").split("|") for row in rows]
    return {c[0].strip(" `/"): set(re.findall(r"[\w/]+", c[-1])) for c in cells}


def drawn():
    """Per wing, from the lowest to the highest, the wings that it imports."""
    return table(ROOT / "docs" / "design" / "wings.md", "it imports")


def modules():
    """The file of each module by its dotted name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name, file, known):
    """The modules of the package that a module imports, with their packages."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None]
            base = ".".join([*(parents if node.level else []), node.module or ""])
            base = base.rstrip(".")
            targets = [f"{base}.{alias.name}" for alias in node.names]
            targets = [t if t in known else base for t in targets]
        else:
            continue
        for target in set(targets) & known.keys() - {name}:
            yield target
            while not f"{name}.".startswith(f"{target}."):
                yield target
                target = target.rpartition(".")[0]


def graph(known):
    return {name: set(imports(name, file, known)) for name, file in known.items()}


def wing_of(name, known):
    parts = name.split(".")
    is_package = len(parts) > 1 and known[".".join(parts[:2])].name == "__init__.py"
    return parts[1] if is_package else ABOVE


def circle(edges):
    """The modules of one circle, in the order of their imports; None without one."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        found = next(filter(None, map(visit, sorted(edges[name]))), None)
        path.pop()
        done.add(name)
        return found

    return next(filter(None, map(visit, sorted(edges))), None)


def test_no_modules_import_each_other_in_a_circle():
    found = circle(graph(modules()))
    assert not found, " -> ".join(found)
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_wings_import_what_the_table_says():
    known, wings = modules(), drawn()
    found = {wing: set() for wing in [*wings, ABOVE]}
    for name, targets in graph(known).items():
        wing = wing_of(name, known)
        found[wing] |= {wing_of(target, known) for target in targets} - {wing}
    assert found.pop(ABOVE) <= set(wings)
    assert found == wings


@pytest.mark.parametrize("of", ["wings", "src"])
def test_arrows_of_the_table_point_down(of):
    lower = set()
    for name, arrows in (drawn() if of == "wings" else folders_of_src()).items():
        assert arrows <= lower, f"{name}/ needs {arrows - lower}, expected {lower}"
        lower.add(name)


@pytest.mark.parametrize("wing", drawn())
def test_each_wing_says_what_it_is_and_what_it_must_not_know(wing):
    text = ast.get_docstring(ast.parse((PACKAGE / wing / "__init__.py").read_text()))
    assert "Used by" in text and re.search(r"must not know|No other wing", text)
    assert len(text.splitlines()) <= 6


# ---- src -----------------------------------------------------------------------------


def folders_of_src():
    """Per folder of src, from the lowest to the highest, those that it includes."""
    return table(ROOT / "CONTRIBUTING.md", "it includes")


def includes():
    """Each source or header below a folder of src, with what it includes of src."""
    for file in (ROOT / "src").glob("*/**/*.*"):
        found = re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
        for target in found:
            yield file.relative_to(ROOT / "src"), Path(target)


def folder_of(path):
    """`collective` has three folders; those within the others belong to them."""
    return "/".join(path.parts[: 2 if path.parts[0] == "collective" else 1])


def test_folders_of_src_include_what_the_table_says():
    found = {}
    for file, target in includes():
        folders = found.setdefault(folder_of(file), set())
        if len(target.parts) > 1:  # otherwise it lies beside the file
            folders |= {folder_of(target)} - {folder_of(file)}
    assert found == folders_of_src()


def test_the_cpu_and_the_cuda_half_do_not_include_each_other():
    for file, target in includes():
        halves = {"cpu", "cuda"} & {*file.parent.parts, *target.parent.parts}
        assert len(halves) < 2, f"{file} includes {target}"
