"""Break the code in one place, run the nearest tests, and list the breaks that live.

    python scripts/mutants.py --count 30 src/exchange gluon_syncbn/native

Each break (mutant) is one small edit, for example `<` becomes `<=`, or a statement is
removed. It is made in a copy of the committed files. A mutant that all tests pass is a
line that no test holds, or whose effect does not matter.
"""

import argparse
import io
import os
import random
import re
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ("test_exchange", "test_ranks", "test_schedules", "test_op")
LIBRARIES = ("gluon_syncbn", "gluon_syncbn_mpi")
PACKAGE = "tests/package/test_public_arguments.py", "tests/package/test_main.py"
# The first folder that fits has the nearest tests: native ones, then files for pytest.
NEAREST = [
    ("src/exchange/mpi_transport.cc", (), ["tests/distributed"]),
    ("src/exchange", NATIVE[:3], ["tests/layer/test_every_kind.py"]),
    ("src/op", NATIVE[3:], ["tests/layer"]),
    ("src/mxnet", (), ["tests/layer", "tests/parallel/test_errors.py"]),
    ("gluon_syncbn/distributed", (), ["tests/distributed"]),
    ("gluon_syncbn/native", (), [*PACKAGE, "tests/parallel"]),
    ("gluon_syncbn/parallel", (), [*PACKAGE, "tests/parallel", "tests/statistics"]),
]
SWAPS = {
    **{"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"},
    **{"&&": "||", "||": "&&", "and": "or", "or": "and", "+": "-", "-": "+"},
    **{"true": "false", "false": "true", "True": "False", "False": "True"},
    **{"not": "", "!": "", "+=": "-=", "0": "1", "1": "2"},
}
WORDS = re.compile(r"[=!<>+-]=|&&|\|\||\+\+|--|->|\w+(?:\.\w+)?|(?<= )[<>](?= )|[+!-]")
STATEMENT = re.compile(r"(?!return\b|using\b|const\b|static\b)[\w.>():*&\[\]-]+[^{}]*;")


def code_of(path):
    """Return (line, first column, code without comments and texts) of each line."""
    text = path.read_text()
    if path.suffix != ".py":
        blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
        text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text)
        text = re.sub(
            r"^\s*#.*|\btemplate\b.*|^.*\boperator\b.*", blank, text, flags=re.M
        )
        return list(enumerate(text.splitlines()))
    lines = [[" "] * len(line) for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            row, column = token.start
            lines[row - 1][column : column + len(token.string)] = token.string
    return [(k, "".join(line)) for k, line in enumerate(lines)]


def mutants_of(path):
    """Return (line number, the changed line) for each small edit of a file."""
    lines, found = path.read_text().splitlines(), []
    for number, code in code_of(path):
        line = lines[number]
        for word in WORDS.finditer(code):
            if word[0] in SWAPS:
                begin, end = word.span()
                found.append((number, line[:begin] + SWAPS[word[0]] + line[end:]))
        is_call = path.suffix == ".py" and re.fullmatch(
            r"\s+[\w.]+\(.*\)", code.rstrip()
        )
        indent = line[: len(line) - len(line.lstrip())]
        if is_call:
            found.append((number, f"{indent}pass"))
        elif path.suffix != ".py" and STATEMENT.fullmatch(code.strip()):
            found.append((number, f"{indent};"))
    return found


def run(command, folder, seconds, **environment):
    """Return True if a command ends well in time."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return False


class Tree:
    """A copy of the committed files with a build of its own."""

    def __init__(self, folder):
        self.folder, self.build = Path(folder), Path(folder) / "build" / "mutants"
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        options = "-G", "Ninja", "-DGLUON_SYNCBN_BUILD_TESTS=ON"
        configure = "cmake", "-S", self.folder / "src", "-B", self.build, *options
        if not (run(configure, folder, 600) and self.make([*LIBRARIES, *NATIVE])):
            sys.exit("the tree does not build")

    def make(self, targets):
        command = "cmake", "--build", self.build, "--target", *targets
        if not run(command, self.folder, 900):
            return False
        for library in self.build.glob("libgluon_syncbn*.so"):
            target = self.folder / "gluon_syncbn" / library.name
            target.unlink(missing_ok=True)  # not written in place: it may be loaded
            target.write_bytes(library.read_bytes())
        return True

    def fate(self, path, number, changed):
        """Return "killed", "lives" or "does not build" for a mutant."""
        native, files = next(
            rest for prefix, *rest in NEAREST if path.startswith(prefix)
        )
        file, files = self.folder / path, [f for f in files if (ROOT / f).exists()]
        content = file.read_text()
        lines = content.splitlines(keepends=True)
        lines[number] = changed + "\n"
        try:
            file.write_text("".join(lines))
            targets = [*native, *(LIBRARIES if files else [])]
            if path.startswith("src") and not self.make(targets):
                return "does not build"
            pytest = sys.executable, "-m", "pytest", "-qx", "-n", "1", *files
            here = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
            commands = [[str(self.build / test)] for test in native]
            commands += [pytest] if files else []
            passes = all(run(c, self.folder, 600, **here) for c in commands)
            return "lives" if passes else "killed"
        finally:
            file.write_text(content)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="folders or files")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", default=f"{tempfile.gettempdir()}/mutants")
    arguments = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", *arguments.paths],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    kinds = ".py", ".cc", ".h"
    files = [path for path in listed.stdout.split() if path.endswith(kinds)]
    found = [(path, *mutant) for path in files for mutant in mutants_of(ROOT / path)]
    random.Random(arguments.seed).shuffle(found)
    tree, fates = Tree(arguments.tree), []
    for path, number, changed in found[: arguments.count]:
        fates.append(tree.fate(path, number, changed))
        row = fates[-1], f"{path}:{number + 1}", changed.strip()
        print(*row, sep="\t", flush=True)
    counts = {fate: fates.count(fate) for fate in sorted({*fates})}
    print(f"{len(found)} possible mutants, of which were tried: {counts}")


if __name__ == "__main__":
    main()
