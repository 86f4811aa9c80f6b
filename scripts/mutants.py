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
LIBRARIES = ("gluon_syncbn", "gluon_syncbn_mpi")
EVERY_KIND = "tests/layer/test_every_kind.py"
ARGUMENTS = "tests/package/test_public_arguments.py"
NETS = [f"tests/parallel/test_{x}.py" for x in ("errors", "parallel_net", "process")]
RANKS = "tests/distributed"
NATIVE = [f"test_{x}" for x in "op cuda_op exchange ranks schedules".split()]
# The first folder that fits has the nearest tests, the quickest first: native ones, and
# files for pytest.
NEAREST = [
    ("src/exchange/mpi_transport.cc", [], [RANKS]),
    ("src/exchange", NATIVE, NETS[:2]),
    ("src/op/cuda", ["test_cuda_op"], []),
    ("src/op", NATIVE[:2], [EVERY_KIND, "tests/layer", *NETS, "tests/statistics"]),
    ("src/mxnet/errors.cc", ["test_errors"], NETS),
    ("src/mxnet", [], [EVERY_KIND, "tests/layer", *NETS, "tests/parallel"]),
    ("gluon_syncbn/distributed", [], [RANKS]),
    ("gluon_syncbn/native", [], [ARGUMENTS, *NETS, "tests/parallel", RANKS]),
    ("gluon_syncbn/parallel", [], [ARGUMENTS, *NETS, "tests"]),
]
SWAPS = {
    **{"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"},
    **{"&&": "||", "||": "&&", "and": "or", "or": "and", "+": "-", "-": "+"},
    **{"true": "false", "false": "true", "True": "False", "False": "True"},
    **{"not": "", "!": "", "+=": "-=", "0": "1", "1": "2"},
}
WORDS = re.compile(
    r"[=!<>+-]=|(?<= )&&|\|\||\+\+|--|->|\w+(?:\.\w+)?|(?<= )[<>](?= )|[+!-]"
)
STATEMENT = re.compile(
    r"(?:throw|delete|break|continue|if|for|\+\+)\b[^{}]*;"
    r"|[\w.>:*&\[\]-]+(?:\(|->| [+-]?= |\+\+)[^{}]*;"
    r"|\s+(?:raise )?[\w.]+\(.*\)"
)


def code_of(path):
    """Return each line of a file without comments and texts."""
    text = path.read_text()
    if path.suffix != ".py":
        texts = r'//[^\n]*|"(?:\\.|[^"\\\n])*"'
        others = r"^ *#.*|\b(?:template|static_assert)\b.*|^.*\boperator\b.*"
        for never in texts, others:
            text = re.sub(never, lambda match: " " * len(match[0]), text, flags=re.M)
        return text.splitlines()
    lines = [[" "] * len(line) for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            row, column = token.start
            lines[row - 1][column : column + len(token.string)] = token.string
    return ["".join(line) for line in lines]


def mutants_of(path):
    """Return (line number, the changed line) for each small edit of a file."""
    found, nothing = [], "pass" if path.suffix == ".py" else ";"
    lines = path.read_text().splitlines()
    for number, (line, code) in enumerate(zip(lines, code_of(path))):
        for word in WORDS.finditer(code):
            if word[0] in SWAPS and not (word[0] == "+" and '"' in line):
                begin, end = word.span()
                found.append((number, line[:begin] + SWAPS[word[0]] + line[end:]))
        if STATEMENT.fullmatch(code.rstrip() if nothing == "pass" else code.strip()):
            found.append((number, re.match(r"\s*", line)[0] + nothing))
    return found


def run(command, folder, seconds, **environment):
    """Return True if a command ends well in time."""
    environment = {**os.environ, **environment}
    nowhere = subprocess.DEVNULL
    streams = {"stdout": nowhere, "stderr": nowhere, "start_new_session": True}
    process = subprocess.Popen(command, cwd=folder, env=environment, **streams)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return False


class Tree:
    """A clone of the committed files with a build of its own."""

    def __init__(self, folder):
        self.folder, self.build = Path(folder), Path(folder) / "build" / "mutants"
        if not self.folder.exists():
            subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
        # This changes the time of no file that is as it should be, so little is built.
        for update in ["fetch -q origin HEAD", "reset -q --hard FETCH_HEAD"]:
            subprocess.run(["git", *update.split()], cwd=folder, check=True)
        configure = f"""cmake -S src -B {self.build} -G Ninja -DCMAKE_BUILD_TYPE=None
            -DCMAKE_CXX_FLAGS=-O1 -DGLUON_SYNCBN_WIDE_KERNELS=OFF
            -DGLUON_SYNCBN_BUILD_TESTS=ON -DGLUON_SYNCBN_CUDA=0"""
        if not (run(configure.split(), folder, 600) and self.make(*LIBRARIES)):
            sys.exit("the tree does not build")

    def make(self, *targets):
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
        file, content = self.folder / path, (self.folder / path).read_text()
        lines = content.splitlines(keepends=True)
        lines[number] = changed + "\n"
        # Given a folder and one of its files, pytest would run the file only.
        found = [sorted(self.folder.glob(f"{x}/**/test_*.py")) or [x] for x in files]
        files = dict.fromkeys(str(self.folder / x) for group in found for x in group)
        pytest = [sys.executable, "-m", "pytest", "-qx", "-o", "timeout=100", *files]
        commands = {(test,): [self.build / test] for test in native}
        commands.update({LIBRARIES: pytest} if files else {})
        here = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            file.write_text("".join(lines))
            for targets, command in commands.items():
                if not self.make(*targets):
                    return "does not build"
                seconds = 900 if command is pytest else 150
                if not run(command, self.folder, seconds, **here):
                    return "killed"
            return "lives"
        finally:
            file.write_text(content)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="folders or files")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", default=f"{tempfile.gettempdir()}/mutants")
    arguments = parser.parse_args()
    command = ["git", "ls-files", *arguments.paths]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split()
    files = [path for path in listed if path.endswith((".py", ".cc", ".h"))]
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
