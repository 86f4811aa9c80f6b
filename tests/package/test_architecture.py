"""The wings of the package and the folders of src: imports and includes go down only.

Their order, and what each may import or include, stand in one place: for the wings the
table of docs/design/wings.md, for src that of CONTRIBUTING.md. An import inside of a
function counts as one at the top, and importing a module runs its packages too.
What is private to MXNet is used in one wing only.
"""

import ast
import importlib.util
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


def test_no_modules_import_each_other_in_a_circle():
    left = graph(modules())
    while any(not targets & left.keys() for targets in left.values()):
        left = {name: t for name, t in left.items() if t & left.keys()}
    assert not left, "these import each other in circles, or what does"


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


# ---- MXNet's private side ------------------------------------------------------------


def private_names(tree):
    """The private attributes that a module reads or sets of others than `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            names = [] if is_own or ast.unparse(owner) == "super()" else [node.attr]
        elif isinstance(node, ast.ImportFrom) and "mxnet" in (node.module or ""):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((n, node.lineno) for n in names if re.match(r"_[^_]", n))


def test_mxnets_private_names_are_used_in_one_wing():
    mxnet = Path(importlib.util.find_spec("mxnet").origin).parent
    sources = [
        file.read_text(encoding="utf-8")
        for file in [mxnet / "base.py", mxnet / "autograd.py"]
        + [*mxnet.glob("gluon/**/*.py"), *mxnet.glob("ndarray/*.py")]
        + [*mxnet.glob("symbol/**/*.py"), *mxnet.glob("optimizer/*.py")]
    ]
    theirs = {n for text in sources for n in re.findall(r"\b_[a-zA-Z]\w+", text)}
    assert {"_LIB", "_kwargs", "_fresh_grad", "_trainer", "_init_impl"} <= theirs
    found = {
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in PACKAGE.rglob("*.py")
        if "mxnet_private" not in file.parts
        for name, line in private_names(ast.parse(file.read_text(encoding="utf-8")))
        if name in theirs
    }
    assert not found, f"{sorted(found)}, expected a function in mxnet_private"


# ---- the way of the data -------------------------------------------------------------


def hops():
    """(function, file) of each row on the page of the way of x and dy."""
    page = (ROOT / "docs" / "design" / "data_path.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([\w.:]+)` \| `([\w./]+)` \|", page, re.MULTILINE)


@pytest.mark.parametrize("function, place", hops())
def test_functions_on_the_way_of_the_data_exist(function, place):
    files = [f for top in (PACKAGE, ROOT / "src") for f in top.rglob(Path(place).name)]
    (file,) = (f for f in files if f.as_posix().endswith(f"/{place}"))
    name = re.split(r"\.|::", function)[-1]
    text = file.read_text(encoding="utf-8")
    definition = rf"(def|class) {name}\b" if file.suffix == ".py" else rf"[ :>]{name}\("
    assert re.search(rf"^[^/]*{definition}", text, re.MULTILINE)


# ---- src -----------------------------------------------------------------------------


def folders_of_src():
    """Per folder of src, from the lowest to the highest, those that it includes."""
    return table(ROOT / "CONTRIBUTING.md", "it includes")


def includes():
    """Each source or header below a folder of src, with what it includes of src."""
    for file in (ROOT / "src").glob("*/**/*.*"):
        found = re.findall(
            r'^#include "([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE
        )
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
