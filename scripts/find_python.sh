# Finds an interpreter that MXNet 1.9.1 has wheels for; sourced by environment.sh and wheels.sh.
# PYTHON chooses it.

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.10 python3.9 python3.8 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: MXNet 1.9.1 needs Python 3.8 to 3.11, found none of them as" \
        "${PYTHON:-python3.11, python3.10, python3.9, python3.8, python3 or python}" >&2
    return 1
}
