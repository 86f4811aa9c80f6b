#!/usr/bin/env bash
# Make `import mxnet` work on aarch64. MXNet's wheel loads three of Arm's libraries, which it does not
# contain. This builds one that loads OpenBLAS and LAPACKE in the place of Arm's, and two empty ones.
set -eu
folder=${1:-$(python -c "import importlib.util as u; print(u.find_spec('mxnet').submodule_search_locations[0])")}
make_library() {
    local name=$1
    shift
    ${CC:-cc} -shared -o "$folder/$name" -Wl,-soname,"$name" -Wl,--no-as-needed -x c /dev/null -x none "$@"
}
make_library libarmpl_lp64_mp.so -llapacke -lopenblas
make_library libamath.so -lm
make_library libastring.so
echo "built libarmpl_lp64_mp.so, libamath.so and libastring.so in $folder"
