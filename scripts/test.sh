#!/usr/bin/env bash
# Install everything and run the test suite, two tests at once. Arguments go to pytest: --full adds
# sanitizers, repeated builds and other long tests; -n 0 uses one process, as debuggers need.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
exec python -m pytest -n 2 --dist worksteal "$@"
