#!/usr/bin/env bash
# build.sh FOLDER PYTHON: builds FOLDER/raw/*.whl out of the source distribution in FOLDER.
# Run by wheels.sh, in the older root or on the machine itself. Objects are kept for the next time.
set -euo pipefail
cd "$1"

rm -rf new raw
mkdir new
tar -xf ./*.tar.gz -C new --strip-components=1
if [ -d sources/build ]; then mv sources/build new/; fi
rm -rf sources
mv new sources

if [ ! -x tools/bin/pip ]; then
    "$2" -m venv tools
    tools/bin/pip install --quiet --upgrade pip # an old one builds in a copy, and all anew
fi
# MXNet and other extensions may bring a libstdc++ of another version. Exceptions go on into MXNet,
# for which both have to use one unwinder, so libgcc stays shared; every system has it.
export LDFLAGS="-static-libstdc++ -Wl,--exclude-libs,ALL"
tools/bin/pip wheel --no-deps --verbose --wheel-dir raw ./sources
