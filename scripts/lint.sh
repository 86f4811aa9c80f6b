#!/usr/bin/env bash
# What needs no test: style, private names, imports of the wings, types, tables of pages.
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
ruff check .
ruff format --check .
lint-imports
mypy
cog --check -I scripts README.md docs/benchmarks.md docs/guides/mxnet2.md
bash -n scripts/*.sh
# What a folder of src may include, its CMakeLists.txt says, but not of these halves:
if grep -rn '#include ".*cuda/' src/*/cpu || grep -rn '#include ".*cpu/' src/*/cuda; then
    echo "the CPU and the CUDA half include nothing of each other" >&2
    exit 1
fi
