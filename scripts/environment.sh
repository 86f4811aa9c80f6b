# Create and activate the project's virtual environment: pinned packages, and this package built
# from source. Other scripts source this file in the repository's root. Repeating it is quick.
#
# PYTHON is the interpreter (3.8 to 3.13), VENV the folder (default: .venv). GLUON_SYNCBN_CUDA=1 also
# builds the CUDA kernels, which takes minutes and which CPUs do not need.
export GLUON_SYNCBN_CUDA=${GLUON_SYNCBN_CUDA-0}

find_python() {
    local candidate usual="python3.11 python3.12 python3.10 python3.9 python3.8 python3.13 python3 python"
    for candidate in ${PYTHON:-$usual}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: none of these commands runs Python 3.8 to 3.13: ${PYTHON:-${usual// /, }}" >&2
    return 1
}
VENV=${VENV:-.venv}
if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python) || exit 1
    echo "creating the environment $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || exit 1
fi
. "$VENV/bin/activate" || exit 1

# Nothing needs to be done while these inputs are unchanged.
inputs=$({
    cat scripts/environment.sh requirements.txt docs/requirements.txt pyproject.toml setup.py \
        gluon_syncbn/native/library.py $(find src -type f | sort)
    echo "$GLUON_SYNCBN_CUDA" "${CUDAARCHS:-}" "$(command -v nvcc)"
    echo "${CUDACXX:-}" "${CUDAHOSTCXX:-}" "${CXX:-}" "${GLUON_SYNCBN_MPICXX:-}"
} | sha256sum)
if [ "$(cat "$VENV/installed" 2>/dev/null)" != "$inputs" ]; then
    echo "installing pinned packages in $VENV (1 to 2 minutes)"
    pip install --quiet --disable-pip-version-check -r requirements.txt || exit 1
    pip install --quiet --disable-pip-version-check --no-deps mxnet==1.9.1 || exit 1
    echo "building the library from source (1 to 2 minutes on two cores)"
    # pip hides the output of a build or prints all of it, so print the build's own lines only.
    PIP_VERBOSE=1 pip install --disable-pip-version-check -e . 2>&1 | tee "$VENV/install.log" |
        sed -un 's/^.*-- gluon_syncbn: /gluon_syncbn: /p'
    if [ "${PIPESTATUS[0]}" != 0 ]; then
        tail -n 30 "$VENV/install.log" >&2
        exit 1
    fi
    echo "$inputs" >"$VENV/installed"
    echo "the environment is ready; the next start takes a second"
fi
