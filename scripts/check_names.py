"""Report names in backticks on the design pages that the tree does not have.

A name is a path, `Class.name` of Python or `Class::Name` of C++. The exit status is 1
if a path, or a member of one of this project's classes, does not exist.
"""

import re
import subprocess
import sys
from pathlib import Path

FILES = subprocess.check_output(["git", "ls-files"], text=True).split()
PAGES = [f for f in FILES if re.match("CONTRIBUTING.md|docs/design/", f)]
SOURCES = [
    Path(f).read_text(encoding="utf-8")
    for f in FILES
    if re.match(r"(src|gluon_syncbn)/.*\.(py|h|cc)$", f)
]
PATH = re.compile(r"[\w./-]+(/|\.(py|h|cc|cu|cuh|inl|c|sh|toml|cmake))")
MXNETS = {"graph_executor.cc", "lib_api.h", "threaded_engine.cc"}
MEMBER = re.compile(r"(\w+)(\.|::)(\w+)(\(.*\))?")


def has_path(name):
    name = name.rstrip("/")
    return any(f"/{name}/" in f"/{file}/" for file in FILES)


def has_member(owner, separator, member):
    """Return True if the member exists, or the class is of another Python project."""
    owners = [s for s in SOURCES if re.search(rf"\b(class|struct) {owner}\b", s)]
    is_foreign = separator == "." and not owners
    return is_foreign or any(re.search(rf"\b{member}\b", s) for s in owners)


found = 0
for page in PAGES:
    lines = Path(page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        for name in re.findall("`([^`]+)`", line):
            member = MEMBER.fullmatch(name)
            if PATH.fullmatch(name):
                exists = name in MXNETS or has_path(name)
            else:
                exists = not member or has_member(*member.groups()[:3])
            if not exists:
                print(f"{page}:{number}: {name}")
                found += 1
sys.exit(found > 0)
