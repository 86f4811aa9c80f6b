"""Report phrases and openings of comments that CONTRIBUTING.md's rules replace.

The exit status is 1 if a page, a Python file or a C++ file has such a phrase.
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
NO_SUBJECT = re.compile(
    r"(of|in|by|for|with|to|at|from|on|behind|beside|without|under|between|"
    r"what|which|whose|tells|lets|notes)\b",
    re.I,
)
NOT_IMPERATIVE = re.compile(r"(an?|the|what|whether|how|\w+[^s]s)\b", re.I)
SUFFIXES = "py md h cc cu cuh inl c".split()


def python_comments(text):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            yield line, token.line[:column], token.string.lstrip("# ")


def cpp_comments(text):
    for line, content in enumerate(text.splitlines(), 1):
        code, slashes, words = content.partition("//")
        if slashes:
            yield line, code, words.lstrip("/!< ")


def docstrings(text):
    """Yield the line and the text of docstrings, and whether they need a verb."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            words = ast.get_docstring(node)
            if words:
                yield node.body[0].lineno, words, is_public_action(node)


def is_public_action(node):
    if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test_")):
        return False
    decorators = " ".join(map(ast.dump, node.decorator_list))
    return not re.search("property|fixture", decorators)


def faults(path, text):
    """Yield the lines and the phrases that have a plain replacement."""
    joined = re.sub(r"\n *(//|#) ", "\n ", text)  # a phrase may continue below
    for match in PHRASE.finditer(joined):
        yield joined.count("\n", 0, match.start()) + 1, " ".join(match[0].split())
    if path.endswith(".md"):
        return
    is_python, last = path.endswith(".py"), 0
    for line, code, words in (python_comments if is_python else cpp_comments)(text):
        if (code.strip() or last != line - 1) and NO_SUBJECT.match(words):
            yield line, f"begins with {words.split()[0]}"
        last = line
    for line, words, is_action in docstrings(text) if is_python else ():
        if NO_SUBJECT.match(words) or is_action and NOT_IMPERATIVE.match(words):
            yield line, f"begins with {words.split()[0]}"


listed = subprocess.check_output(["git", "ls-files", *(f"*.{s}" for s in SUFFIXES)])
found = 0
for path in listed.decode().split():
    with open(path, encoding="utf-8") as file:
        for line, phrase in faults(path, file.read()):
            print(f"{path}:{line}: {phrase}")
            found += 1
sys.exit(found > 0)
