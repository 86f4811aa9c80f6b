# Finds an interpreter that the package is for; sourced by environment.sh and wheels.sh.
# PYTHON chooses it.

find_python() {
    local candidate usual="python3.11 python3.12 python3.10 python3.9 python3.8 python3.13 python3 python"
    for candidate in ${PYTHON:-$usual}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: gluon_syncbn needs Python 3.8 to 3.13, found none of them as" \
        "${PYTHON:-${usual// /, }}" >&2
    return 1
}
