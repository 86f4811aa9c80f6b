"""Report phrases to reword, comments without a subject, and names that do not exist.

Phrases are searched in pages and sources. Names in backticks are checked only on the
design pages and in CONTRIBUTING.md. A name is a path, `Class.name` of Python or
`Class::Name` of C++. The exit status is 1 if there is a fault.
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
# The beginning of a comment or a docstring.
PYTHON_MARK, CPP_MARK = re.compile(r'#+ *|"""'), re.compile(r"//[/!<]* *")
PATH = re.compile(r"[\w./-]+(/|\.(py|h|cc|cu|cuh|inl|c|sh|toml|cmake))")
MXNET_FILES = {"graph_executor.cc", "lib_api.h", "threaded_engine.cc"}
MEMBER = re.compile(r"(\w+)(\.|::)(\w+)(\(.*\))?")

FILES = subprocess.check_output(["git", "ls-files"], text=True).split()
TEXTS = {
    file: Path(file).read_text(encoding="utf-8")
    for file in FILES
    if re.search(r"\.(py|md|h|cc|cu|cuh|inl|c)$", file)
}
SOURCES = [
    text
    for file, text in TEXTS.items()
    if re.match(r"(src|gluon_syncbn)/.*\.(py|h|cc)$", file)
]


def phrases(path, text):
    """Yield the line and text of each phrase to reword and each wrong beginning."""
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
            if not code.strip():  # a comment behind code does not continue below
                last = line


def missing_names(text):
    """Yield the lines and the names in backticks that do not exist."""
    for line, content in enumerate(text.splitlines(), 1):
        for name in re.findall("`([^`]+)`", content):
            member = MEMBER.fullmatch(name)
            if PATH.fullmatch(name):
                exists = name in MXNET_FILES or has_path(name)
            else:
                exists = not member or has_member(*member.groups()[:3])
            if not exists:
                yield line, name


def has_path(name):
    name = name.rstrip("/")
    return any(f"/{name}/" in f"/{file}/" for file in FILES)


def has_member(owner, separator, member):
    """Return True if the member exists, or the class is of another Python project."""
    owners = [s for s in SOURCES if re.search(rf"\b(class|struct) {owner}\b", s)]
    is_foreign = separator == "." and not owners
    return is_foreign or any(re.search(rf"\b{member}\b", s) for s in owners)


status = 0
for path, text in TEXTS.items():
    faults = [*phrases(path, text)]
    if re.match("CONTRIBUTING.md|docs/design/", path):
        faults += missing_names(text)
    for line, fault in faults:
        print(f"{path}:{line}: {fault}")
        status = 1
sys.exit(status)
