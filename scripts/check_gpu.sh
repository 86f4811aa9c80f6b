#!/usr/bin/env bash
# Check the CUDA kernels on a GPU: build the programs, verify the kernels and the operator, time
# the kernels, and look for races and bad accesses with the time that is left. It needs nvcc, a
# C++ compiler that nvcc accepts, and NVIDIA's driver; no Python, MXNet or network. The folder OUT
# receives logs. All parts together end after SECONDS, by default 540.
#
#     bash scripts/check_gpu.sh OUT [SECONDS]
#     EMULATED=1 bash scripts/check_gpu.sh OUT    # small sizes on a CPU, which needs g++ only
#
# Variables: PARTS lists the parts to run, by default those in `order`. BUILD is a folder for the
# programs. GENERATION is the GPU's compute capability without the dot, such as 90. PYTHON is an
# interpreter; if it has torch with CUDA, torch's kernels are timed too. LIBMXNET is the path of a
# libmxnet.so, whose missing libraries are listed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
out=$(mkdir -p "${1:?pass a folder for the logs}" && cd "$1" && pwd) || exit 2
deadline=${2:-540}
emulated=${EMULATED:-}
order="libraries build kernels operator benchmark torch memcheck racecheck synccheck initcheck large"
parts=${PARTS:-$order}
build=${BUILD:-build/gpu${emulated:+_emulated}}
build=$(mkdir -p "$build" && cd "$build" && pwd) || exit 2
size=large
[ -z "$emulated" ] || size=small
passed=() failed=() left_out=()

summary() {
    trap - EXIT
    echo "== passed: ${passed[*]:-none}; left out: ${left_out[*]:-none};" \
        "FAILED: ${failed[*]:-none}; $SECONDS s"
    exit $((${#failed[@]} > 0))
}
trap summary EXIT
trap 'failed+=("${part:-start} (stopped)"); kill "${job:-}" 2>/dev/null; exit' INT TERM

fail() {
    echo "$1"
    failed+=("${2:-start}")
    exit
}

# Run a step, print its output as it comes, and write it to a log. If the deadline ends a step, a
# sanitizer or random test is left out, and any other step has failed.
step() {
    local name=$1 status=0 left=$((deadline - SECONDS))
    shift
    if [ $left -le 2 ]; then
        status=124
    else
        timeout --kill-after=2 "$left" "$@" > >(tee "$out/$name.log") 2>&1 &
        job=$!
        wait $job || status=$?
    fi
    case $status,$name in
    0,*) passed+=("$name") ;;
    124,*check | 137,*check | 124,large | 137,large) left_out+=("$name (time)") ;;
    124,* | 137,*) failed+=("$name (time)") ;;
    *) failed+=("$name") ;;
    esac
    echo "  $name: status $status, at second $SECONDS of $deadline"
}

# Compile all sources at once, and link three programs.
compile() {
    local flags=(-std=c++17 -O2 -DSYNCBN_CUDA_MISSING='""')
    local sources=(src/core/*.cc src/exchange/*.cc src/op/*.cc src/op/cpu/*.cc src/op/cuda/*.cc
        src/kernels/cuda/*.cu src/kernels/cpu/isa_generic.cc src/kernels/cpu/tiles.cc
        tests/cpp/test_cuda_kernels.cc tests/cpp/test_cuda_op.cc scripts/benchmarks/benchmark_gpu.cc)
    if [ -n "$emulated" ]; then
        compiler=(g++ -x c++ "${flags[@]}" -O1 -DSYNCBN_CUDA -Itests/cpp/emulated_cuda)
        sources+=(tests/cpp/emulated_cuda/*.cc)
    else
        compiler=(nvcc "${flags[@]}" -DSYNCBN_CUDA -gencode
            "arch=compute_$generation,code=sm_$generation")
    fi
    compiler+=(-Isrc -Itests/cpp -I"$(dirname "$(command -v nvcc || echo /usr/bin/nvcc)")/../include")
    local source objects=() program
    rm -f "$build"/*.o
    for source in "${sources[@]}"; do
        case $source in *mpi_transport.cc) continue ;; esac
        printf '%s\0' "$source"
    done | xargs -0 -P "$(nproc)" -I{} bash -c \
        'source=$1; shift; "${@:2}" -c "$source" -o "$1/$(basename "$source").o" || exit 255' \
        _ {} "$build" "${compiler[@]}" || return 1
    for source in "$build"/*.o; do
        case $source in *test_cuda_* | *benchmark_gpu*) ;; *) objects+=("$source") ;; esac
    done
    local link=(nvcc -cudart static -L"$(dirname "$(command -v nvcc || echo /usr/bin/nvcc)")/../lib")
    [ -z "$emulated" ] || link=(g++ -pthread)
    for program in test_cuda_kernels test_cuda_op benchmark_gpu; do
        "${link[@]}" "$build/$program.cc.o" "${objects[@]}" -ldl -lpthread -o "$build/$program" ||
            return 1
    done
}

run_build() {
    if [ -z "$emulated" ]; then
        command -v nvcc >/dev/null || fail "check_gpu.sh needs nvcc (CUDA's compiler) on PATH" build
        generation=${GENERATION:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader)}
        generation=${generation%%$'\n'*}
        generation=${generation//./}
    fi
    command -v "${CXX:-g++}" >/dev/null || fail "check_gpu.sh needs a C++ compiler such as g++" build
    export -f compile
    step build bash -c "emulated='$emulated' build='$build' generation='${generation:-}'; compile"
    [[ " ${passed[*]:-} " = *" build "* ]] || exit
}

# List the libraries that MXNet's libmxnet.so needs and the loader does not find.
list_libraries() {
    ldd "$LIBMXNET" | grep 'not found' && return 1
    echo "the loader finds every library of $LIBMXNET"
}

if [[ -z $emulated && $parts != build ]] && ! nvidia-smi -L 2>/dev/null; then
    fail "nvidia-smi must find a GPU. Set EMULATED=1 to run small sizes on an emulated GPU."
fi
for part in $parts; do
    case $part in
    build) run_build ;;
    kernels) step kernels "$build/test_cuda_kernels" ;;
    operator) step operator "$build/test_cuda_op" ;;
    benchmark) step benchmark "$build/benchmark_gpu" "$size" ;;
    libraries)
        if [ -n "${LIBMXNET:-}" ]; then
            export -f list_libraries
            step libraries bash -c list_libraries
        fi
        ;;
    torch)
        if "${PYTHON:-python3}" -c 'import torch; torch.cuda.init()' 2>/dev/null; then
            step torch "${PYTHON:-python3}" scripts/benchmarks/benchmark_torch.py "$out/benchmark.log"
        else left_out+=("$part"); fi
        ;;
    memcheck | racecheck | synccheck | initcheck) # these tools need a GPU
        if [ -z "$emulated" ] && command -v compute-sanitizer >/dev/null; then
            step "$part" compute-sanitizer --tool "$part" --error-exitcode 9 \
                "$build/test_cuda_kernels" small
        else left_out+=("$part"); fi
        ;;
    large) # new random data and all combinations, for minutes
        if [ -z "$emulated" ]; then step large "$build/test_cuda_kernels" large
        else left_out+=("$part"); fi
        ;;
    *) fail "PARTS must name parts of this script, got '$part'" ;;
    esac
done
