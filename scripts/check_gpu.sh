#!/usr/bin/env bash
# Runs all that needs a GPU: builds the library for the GPU at hand, checks kernels and layer, looks
# for races and bad accesses, and times the kernels beside a copy and PyTorch's kernels.
#
#     bash scripts/check_gpu.sh OUT
#     EMULATED=1 bash scripts/check_gpu.sh OUT    # the same on a CPU, in a small form
#
# It needs nvcc, cmake and a python3 (or PYTHON); no MXNet. What needs more is left out where that is
# missing, and the script says so: the comparison with PyTorch needs that and NumPy; the sanitizers
# compute-sanitizer; the benchmark PyTorch for its column. OUT receives the logs,
# benchmark_gpu.json, and benchmark_gpu.md, the table for docs/guides/gpus.md.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?where logs go}" && cd "$1" && pwd)
python=${PYTHON:-python3}
emulated=${EMULATED:-}
build=${BUILD:-build/gpu${emulated:+_emulated}}
build=$(mkdir -p "$build" && cd "$build" && pwd)
passed=() failed=() left_out=()

if [ -z "$emulated" ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "nvidia-smi finds no GPU here; EMULATED=1 runs all parts on a CPU, in a small form"
    exit 2
fi

# Runs a step. Its output goes to a log, and the last lines to the terminal.
step() {
    local name=$1 began=$SECONDS
    shift
    if "$@" >"$out/$name.log" 2>&1; then
        passed+=("$name")
        tail -n 2 "$out/$name.log" | sed 's/^/    /'
        echo "  $name: passed, $((SECONDS - began)) s"
    else
        failed+=("$name")
        tail -n 40 "$out/$name.log"
        echo "  $name: FAILED, $((SECONDS - began)) s, see $out/$name.log"
    fi
}
leave_out() {
    left_out+=("$1")
    echo "  $1: left out, because $2"
}
finish() {
    echo "== passed: ${passed[*]:-none}; left out: ${left_out[*]:-none}; FAILED: ${failed[*]:-none}"
    [ ${#failed[@]} -eq 0 ] || exit 1
}

echo "== build"
options=(-S src -B "$build")
targets=(test_cuda_kernels test_cuda_op benchmark_gpu)
if command -v ninja >/dev/null; then options+=(-G Ninja); fi
if [ -n "$emulated" ]; then
    options+=(-DGLUON_SYNCBN_BUILD_TESTS=ON)
else
    # Code for the GPU at hand alone takes a quarter of the time.
    generation=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    options+=(-DGLUON_SYNCBN_CUDA=1 -DGLUON_SYNCBN_CHECKS=ON
        "-DCMAKE_CUDA_ARCHITECTURES=${generation:?}-real")
fi
step configure cmake "${options[@]}"
step build cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}"
[ ${#failed[@]} -eq 0 ] || finish

echo "== kernels"
step kernels "$build/test_cuda_kernels" $([ -n "$emulated" ] && echo small || echo large)

echo "== layer" # beside the layer on CPUs, and what it writes beside PyTorch
mkdir -p "$out/layer"
step layer "$build/test_cuda_op" "$out/layer"
if "$python" -c "import numpy, torch" 2>/dev/null; then
    step pytorch "$python" tests/gpu/compare_with_pytorch.py "$out/layer"
else
    leave_out pytorch "$python has no NumPy and PyTorch"
fi

echo "== sanitizers" # of the kernels' test, because Python and PyTorch make them slow
for tool in memcheck racecheck synccheck initcheck; do
    if [ -n "$emulated" ]; then
        leave_out "$tool" "emulated kernels are code for CPUs"
    elif command -v compute-sanitizer >/dev/null; then
        step "$tool" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$build/test_cuda_kernels" small
    else
        leave_out "$tool" "there is no compute-sanitizer on PATH"
    fi
done

echo "== benchmark"
options=(--program "$build/benchmark_gpu" --output "$out/benchmark_gpu.json")
if [ -n "$emulated" ]; then options+=(--shape 2,8,6,6 --repetitions 2); fi
step benchmark "$python" scripts/benchmarks/benchmark_gpu.py "${options[@]}"
if [ -f "$out/benchmark_gpu.md" ]; then cat "$out/benchmark_gpu.md"; fi
finish
