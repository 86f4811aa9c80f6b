#!/usr/bin/env bash
# Runs all that needs a GPU, in parts of at most 8 minutes, figures first: builds programs for the
# GPU at hand, times the kernels beside copies and PyTorch's, compares the layer with CPUs and
# PyTorch, checks the kernels thoroughly, and looks for races and bad accesses.
#
#     bash scripts/check_gpu.sh OUT
#     PARTS="benchmark layer" bash scripts/check_gpu.sh OUT      # some, of PARTS as below
#     PARTS=build GENERATION=90 BUILD=FOLDER bash scripts/check_gpu.sh OUT    # needs no GPU
#     EMULATED=1 bash scripts/check_gpu.sh OUT                   # on a CPU, in a small form
#     PARTS="build mxnet" bash scripts/check_gpu.sh OUT          # with MXNet, see pack_mxnet.py
#
# Only the part `build` needs nvcc and cmake: BUILD may have been built elsewhere and carried here,
# its programs alone are enough. The benchmark needs a python3 (or PYTHON); only `mxnet`, which does
# not run by default, needs MXNet, as scripts/pack_mxnet.py packs it into BUILD.
# SWEEP="kMostTileSlots=4 kFewSlots=512" builds and times variants with other constants of
# src/kernels/cuda, too. A step that needs more is left out where that is missing, and the script
# says so. OUT receives the logs, benchmark_gpu.json, and benchmark_gpu.md, the tables for
# docs/guides/gpus.md.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?where logs go}" && cd "$1" && pwd)
python=${PYTHON:-python3}
emulated=${EMULATED:-}
parts=${PARTS:-build benchmark layer kernels memcheck racecheck synccheck initcheck}
build=${BUILD:-build/gpu${emulated:+_emulated}}
build=$(mkdir -p "$build" && cd "$build" && pwd)
programs=(benchmark_gpu test_cuda_op test_cuda_kernels)
library=gluon_syncbn${emulated:+_emulated} # of the part `mxnet`
if [[ -z $emulated || $parts = *mxnet* ]]; then programs+=("$library"); fi
limit=470 # seconds of a step
# A finding of compute-sanitizer, in the words of any of its tools.
finding='^=+ .*(Invalid|Uninitialized|Barrier error|Program hit|Race|hazard)'
passed=() failed=() left_out=()

gpus=$(nvidia-smi -L 2>/dev/null || true)
if [[ -z $emulated && $parts != build && $gpus != *GPU* ]]; then
    echo "nvidia-smi finds no GPU here; EMULATED=1 runs all parts on a CPU, in a small form"
    exit 2
fi

leave_out() {
    left_out+=("$1")
    echo "  $1: left out, because $2"
}
# Runs a step. Its output goes to a log, and the last lines to the terminal.
step() {
    local name=$1 began=$SECONDS status=0
    shift
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    if [ $status = 0 ]; then
        passed+=("$name")
        tail -n 2 "$out/$name.log" | sed 's/^/    /'
        echo "  $name: passed, $((SECONDS - began)) s"
    elif [[ $status = 124 && $name = *check ]] && ! grep -Eq "$finding" "$out/$name.log"; then
        leave_out "$name" "$limit s were too few; until then it found nothing"
    else
        failed+=("$name")
        tail -n 40 "$out/$name.log"
        echo "  $name: FAILED with status $status, $((SECONDS - began)) s, see $out/$name.log"
    fi
}
finish() {
    echo "== passed: ${passed[*]:-none}; left out: ${left_out[*]:-none}; FAILED: ${failed[*]:-none}"
    [ ${#failed[@]} -eq 0 ] || exit 1
}

# Builds programs of the sources in one folder into another.
compile() {
    local name=$1 source=$2 folder=$3
    shift 3
    step "configure$name" cmake -S "$source" -B "$folder" "${options[@]}"
    step "build$name" cmake --build "$folder" --parallel "$(nproc)" --target "$@"
    [ ${#failed[@]} -eq 0 ] || finish
}

run_build() {
    local options=() generation=${GENERATION:-} change # `options` are compile's, too
    if command -v ninja >/dev/null; then options+=(-G Ninja); fi
    if [ -n "$emulated" ]; then
        options+=(-DGLUON_SYNCBN_BUILD_TESTS=ON)
    else
        if [ -z "$generation" ]; then
            generation=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader)
            generation=${generation%%$'\n'*}
        fi
        # Code for one generation alone takes a quarter of the time.
        options+=(-DGLUON_SYNCBN_CUDA=1 -DGLUON_SYNCBN_CHECKS=ON
            "-DCMAKE_CUDA_ARCHITECTURES=${generation//./}-real")
    fi
    compile "" src "$build" "${programs[@]}"
    for change in ${SWEEP:-}; do
        rm -rf "$build/$change"
        mkdir -p "$build/$change"
        cp -r src scripts tests "$build/$change"
        sed -Ei "s/^(constexpr \w+ ${change%%=*} = ).*;/\1${change#*=};/" \
            "$build/$change"/src/kernels/cuda/{access,partition}.*
        if diff -rq src "$build/$change/src" >/dev/null; then
            echo "SWEEP has '$change', but src/kernels/cuda has no such constant"
            exit 2
        fi
        compile "_$change" "$build/$change/src" "$build/$change" benchmark_gpu
    done
}

run_benchmark() {
    local program change name options
    for program in "$build/benchmark_gpu" "$build"/*=*/benchmark_gpu; do
        [ -e "$program" ] || continue
        change=${program#"$build"} change=${change%/benchmark_gpu} options=()
        name=benchmark_gpu${change/\//_}
        if [ -n "$change" ]; then
            options=(--shape 4,64,240,240 4,512,60,60 64,2048,7,7 --forwards 0)
        fi
        if [ -n "$emulated" ]; then
            options=(--shape 2,8,6,6 --repetitions 2 --forwards 3)
        fi
        step "$name" "$python" scripts/benchmarks/benchmark_gpu.py --program "$program" \
            --output "$out/$name.json" "${options[@]}"
    done
    if [ -f "$out/benchmark_gpu.md" ]; then cat "$out/benchmark_gpu.md"; fi
}

run_layer() { # beside the layer on CPUs, and what it writes beside PyTorch
    mkdir -p "$out/layer"
    step layer "$build/test_cuda_op" "$out/layer"
    if "$python" -c "import numpy, torch" 2>/dev/null; then
        step pytorch "$python" tests/gpu/compare_with_pytorch.py "$out/layer"
    else
        leave_out pytorch "$python has no NumPy and PyTorch"
    fi
}

run_kernels() {
    step kernels "$build/test_cuda_kernels" "$([ -n "$emulated" ] && echo small || echo large)"
}

run_mxnet() { # through the layer, on a runtime that launches none of MXNet's own kernels
    local folder=$build/mxnet
    if [ ! -d "$folder" ]; then tar -xJf "$folder.tar.xz" -C "$build"; fi
    step mxnet env GLUON_SYNCBN_LIBRARY="$build/lib$library.so" \
        LD_LIBRARY_PATH="$folder/stubs:${emulated:+$folder/emulated:}${LD_LIBRARY_PATH:-}" \
        PYTHONPATH="$folder/site:$PWD" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
        "$python" -m pytest -q tests/layer/test_gpu_contexts.py
}

run_sanitizer() { # of the kernels' test, because Python and PyTorch make it slow
    if [ -n "$emulated" ]; then
        leave_out "$1" "emulated kernels are code for CPUs"
    elif command -v compute-sanitizer >/dev/null; then
        step "$1" compute-sanitizer --tool "$1" --error-exitcode 9 "$build/test_cuda_kernels" small
    else
        leave_out "$1" "there is no compute-sanitizer on PATH"
    fi
}

for part in $parts; do
    echo "== $part"
    case $part in
    build | benchmark | layer | kernels | mxnet) "run_$part" ;;
    memcheck | racecheck | synccheck | initcheck) run_sanitizer "$part" ;;
    *) echo "PARTS has '$part'; expected some of build, benchmark, layer, kernels," \
        "memcheck, racecheck, synccheck, initcheck, mxnet" && exit 2 ;;
    esac
done
finish
