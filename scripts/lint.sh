#!/usr/bin/env bash
# Check style, words, private names, imports between folders, types, and tables of pages.
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
ruff check .
ruff format --check .
lint-imports
mypy
cog --check -I scripts README.md docs/benchmarks.md docs/guides/mxnet2.md
bash -n scripts/*.sh
git ls-files '*.h' '*.c' '*.cc' '*.cu' '*.cuh' '*.inl' | xargs clang-format --dry-run -Werror
python scripts/check_words.py
# CMakeLists.txt limits what each folder of src includes, but does not separate cpu from cuda.
if grep -rn '#include ".*cuda/' src/*/cpu || grep -rn '#include ".*cpu/' src/*/cuda; then
    echo "cpu and cuda folders must not include headers of each other" >&2
    exit 1
fi
