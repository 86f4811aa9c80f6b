#!/usr/bin/env bash
# Sets everything up and runs the whole test suite. Arguments go to pytest.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
exec python -m pytest "$@"
