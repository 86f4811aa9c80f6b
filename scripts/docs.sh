#!/usr/bin/env bash
# Set up .venv, build the documentation in docs/_build/html and check its cross-references. Then
# run the code of pages and docstrings, and the notebook. Arguments go to sphinx-build.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
python -m sphinx -n -W --keep-going -q -E -b html "$@" docs docs/_build/html || exit 1
echo "built docs/_build/html/index.html"
exec python -m pytest -q --nbmake tests/package/test_docs.py gluon_syncbn examples/tour.ipynb
