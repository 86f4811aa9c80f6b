"""Report phrases and openings of comments that CONTRIBUTING.md's rules replace.

The exit status is 1 if a page, a Python file or a C++ file has such a phrase.
"""

import re
import subprocess
import sys
from pathlib import Path

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
SUFFIXES = "py md h cc cu cuh inl c".split()
# The beginning of a comment or a docstring.
PYTHON_MARK, CPP_MARK = re.compile(r'#+ *|"""'), re.compile(r"//[/!<]* *")


def faults(path, text):
    """Yield the lines and the phrases that have a plain replacement."""
    joined = re.sub(r"\n *(//|#) ", "\n ", text)  # a phrase may continue below
    for match in PHRASE.finditer(joined):
        yield joined.count("\n", 0, match.start()) + 1, " ".join(match[0].split())
    if path.endswith(".md"):
        return
    mark, last = PYTHON_MARK if path.endswith(".py") else CPP_MARK, -1
    for line, content in enumerate(text.splitlines(), 1):
        found = mark.search(content)
        if found:
            code, words = content[: found.start()], content[found.end() :]
            if (code.strip() or last != line - 1) and NO_SUBJECT.match(words):
                yield line, f"begins with {words.split()[0]}"
            last = line


command = ["git", "ls-files", *(f"*.{suffix}" for suffix in SUFFIXES)]
found = 0
for path in subprocess.check_output(command, text=True).split():
    for line, phrase in faults(path, Path(path).read_text(encoding="utf-8")):
        print(f"{path}:{line}: {phrase}")
        found += 1
sys.exit(found > 0)
