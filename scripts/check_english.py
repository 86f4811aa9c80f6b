"""Report phrases that docs/design/contributing.md#english replaces with plain ones.

Python files are read with tokenize and ast, C++ files with a regular expression, and
pages as plain text. The exit status is 1 if a file contains such a phrase.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize

PHRASE = re.compile(
    r"\b(tells\s+whether|who[m]|must\s+not\s+know|add(s|ed)?\s+up|(those|that)\s+of)\b"
    r"|,\s+(too|but\s+got)\b",
    re.IGNORECASE,
)
PREPOSITION = re.compile(
    r"(of|in|by|for|with|to|at|from|on|behind|beside|without|under|between)\b", re.I
)
NOT_IMPERATIVE = re.compile(r"(an?|the|what|whether|how|\w+[^s]s)\b", re.I)
CPP_COMMENT = re.compile(r"//+[!<]? ?(.*)")


def python_openings(text):
    """Yield line, first words, and whether a verb must be first, of each text."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_trailing = token.line[: token.start[1]].strip()
            if is_trailing or last != token.start[0] - 1:
                yield token.start[0], token.string.lstrip("# "), False
            last = token.start[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring, is_action(node)


def is_action(node):
    if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test_")):
        return False
    kinds = {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
    return not kinds & {"property", "cached_property", "fixture"}


def cpp_openings(text):
    """Yield the same of each comment."""
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        comment = CPP_COMMENT.search(line)
        if comment:
            is_trailing = line[: comment.start()].strip()
            if is_trailing or last != number - 1:
                yield number, comment.group(1), False
            last = number


def faults(path):
    """Yield a line and the phrase in it that has a plain replacement."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    # A phrase may continue on the next line of a comment.
    for match in PHRASE.finditer(re.sub(r"\n *(//|#) ", "\n ", text)):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match.group().split())
    if path.endswith(".md"):
        return
    openings = python_openings if path.endswith(".py") else cpp_openings
    for line, words, verb_first in openings(text):
        wrong = PREPOSITION.match(words) or (verb_first and NOT_IMPERATIVE.match(words))
        if wrong:
            yield line, f"begins with {wrong.group()!r}"


def main():
    kinds = "py md h cc cu cuh inl c".split()
    listed = subprocess.check_output(["git", "ls-files", *(f"*.{k}" for k in kinds)])
    found = 0
    for path in listed.decode().split():
        for line, phrase in faults(path):
            print(f"{path}:{line}: {phrase}")
            found += 1
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
