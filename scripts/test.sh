#!/usr/bin/env bash
# Sets everything up and runs the test suite, two tests at once. Arguments go to pytest: --full adds
# sanitizers, repeated builds and other long tests; -n 0 runs all in one process, for a debugger.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
exec python -m pytest -n 2 --dist worksteal "$@"
