#!/usr/bin/env bash
# Runs all that needs a GPU: builds the library for the GPU at hand, checks kernels and layer, looks
# for races and bad accesses, and times the kernels beside a copy and PyTorch's kernels.
#
#     bash scripts/check_gpu.sh OUT
#     PARTS="build benchmark" bash scripts/check_gpu.sh OUT    # some of the parts
#     EMULATED=1 bash scripts/check_gpu.sh OUT                 # the same on a CPU, in a small form
#
# It needs nvcc and cmake; no MXNet. A part that needs more is left out where that is missing, and
# the script says so: the layer's tests need a real GPU and a python3 (or PYTHON) with PyTorch, NumPy
# and pytest; the sanitizers compute-sanitizer; the benchmark a python3, and PyTorch for its column.
# OUT receives the logs, benchmark_gpu.json, and benchmark_gpu.md, the table for docs/guides/gpus.md.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?where logs go}" && cd "$1" && pwd)
all=(build kernels layer sanitizers benchmark)
read -ra parts <<<"${PARTS:-${all[*]}}"
for name in "${parts[@]}"; do
    if [[ " ${all[*]} " != *" $name "* ]]; then
        echo "PARTS=\"$PARTS\": expected some of \"${all[*]}\""
        exit 2
    fi
done
if [ ${#parts[@]} -eq 0 ]; then
    echo "PARTS=\"$PARTS\" names no part: expected some of \"${all[*]}\""
    exit 2
fi
python=${PYTHON:-python3}
emulated=${EMULATED:-}
build=${BUILD:-build/gpu${emulated:+_emulated}}
build=$(mkdir -p "$build" && cd "$build" && pwd)
passed=() failed=() left_out=()

if [ -z "$emulated" ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "nvidia-smi finds no GPU here; EMULATED=1 runs all parts on a CPU, in a small form"
    exit 2
fi

has() { command -v "$1" >/dev/null; }
imports() { "$python" -c "import $1" 2>/dev/null; }

# Fails the part if the part build has not built all of these.
check_built() {
    local program
    for program in "$@"; do
        if [ ! -e "$build/$program" ]; then
            failed+=("$program")
            echo "  $program is not built: run the part build first"
            return 1
        fi
    done
}

# Runs a step of a part. Its output goes to a log of its own, and the last lines to the terminal.
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

part_build() {
    local options=(-S src -B "$build")
    if has ninja; then options+=(-G Ninja); fi
    local targets=(test_cuda_kernels benchmark_gpu gluon_syncbn)
    if [ -n "$emulated" ]; then
        options+=(-DGLUON_SYNCBN_BUILD_TESTS=ON)
        targets=(test_cuda_kernels benchmark_gpu)
    else
        # Code for the GPU at hand alone takes a quarter of the time.
        local generation
        generation=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
        options+=(-DGLUON_SYNCBN_CUDA=1 -DGLUON_SYNCBN_CHECKS=ON
            "-DCMAKE_CUDA_ARCHITECTURES=${generation:?}-real")
    fi
    step configure cmake "${options[@]}"
    step build cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}"
}

part_kernels() {
    check_built test_cuda_kernels || return 0
    local size=large
    if [ -n "$emulated" ]; then size=small; fi
    step kernels "$build/test_cuda_kernels" $size
}

part_layer() {
    if [ -n "$emulated" ]; then
        leave_out layer "PyTorch has no memory of emulated GPUs"
        return
    fi
    local missing=() package
    for package in torch numpy pytest; do imports $package || missing+=("$package"); done
    if [ ${#missing[@]} -gt 0 ]; then
        leave_out layer "$python has no ${missing[*]}"
        return
    fi
    if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        leave_out layer "the PyTorch of $python finds no GPU"
        return
    fi
    check_built libgluon_syncbn.so || return 0
    GLUON_SYNCBN_LIBRARY=$build/libgluon_syncbn.so step layer "$python" -m pytest \
        --confcutdir tests/gpu -p no:cacheprovider -q tests/gpu
}

# Runs the kernels' own test under these tools, because Python and PyTorch make them slow.
part_sanitizers() {
    check_built test_cuda_kernels || return 0
    local tool
    for tool in memcheck racecheck synccheck initcheck; do
        if has compute-sanitizer; then
            step "$tool" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
                "$build/test_cuda_kernels" small
        else
            leave_out "$tool" "there is no compute-sanitizer on PATH"
        fi
    done
}

part_benchmark() {
    if ! has "$python"; then
        leave_out benchmark "there is no $python"
        return
    fi
    check_built benchmark_gpu || return 0
    local options=(--program "$build/benchmark_gpu" --output "$out/benchmark_gpu.json")
    if [ -n "$emulated" ]; then options+=(--shape 2,8,6,6 --repetitions 2); fi
    step benchmark "$python" scripts/benchmarks/benchmark_gpu.py "${options[@]}"
    if [ -f "$out/benchmark_gpu.md" ]; then cat "$out/benchmark_gpu.md"; fi
}

for i in "${!parts[@]}"; do
    rest="${parts[*]:i+1}"
    echo "== ${parts[i]} ($((i + 1)) of ${#parts[@]}); then: ${rest:-the summary}"
    "part_${parts[i]}"
done
echo "== passed: ${passed[*]:-none}; left out: ${left_out[*]:-none}; FAILED: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
