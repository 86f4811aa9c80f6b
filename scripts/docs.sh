#!/usr/bin/env bash
# Sets everything up, builds the documentation into docs/_build/html, and runs its tests: examples of
# docstrings and pages, links and anchors. Warnings are errors. Arguments go to sphinx-build.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
python -m sphinx -W --keep-going -q -E -b html "$@" docs docs/_build/html || exit 1
echo "built docs/_build/html/index.html"
exec python -m pytest -q tests/package/test_docs.py tests/package/test_readme.py gluon_syncbn
