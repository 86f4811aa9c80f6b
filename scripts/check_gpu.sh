#!/usr/bin/env bash
# Check the CUDA kernels on a GPU: build the programs, time and test the kernels, test the layer,
# and look for races and bad accesses. The folder OUT receives logs. PARTS lists the parts to run,
# by default all except `mxnet`. docs/design/gpus.md describes `mxnet` and has more examples.
#
#     bash scripts/check_gpu.sh OUT
#     EMULATED=1 PARTS="build layer" bash scripts/check_gpu.sh OUT    # small sizes on a CPU
#
# Other variables: BUILD is a folder for the programs. GENERATION is the GPU's compute capability
# without the dot, such as 90. PYTHON is the interpreter for the part `mxnet`.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?pass a folder for the logs}" && cd "$1" && pwd)
python=${PYTHON:-python3}
emulated=${EMULATED:-}
parts=${PARTS:-build benchmark layer kernels memcheck racecheck synccheck initcheck}
build=${BUILD:-build/gpu${emulated:+_emulated}}
build=$(mkdir -p "$build" && cd "$build" && pwd)
library=gluon_syncbn${emulated:+_emulated}
if [ -n "$emulated" ]; then size=small; else size=large; fi
passed=() failed=() left_out=()

if [[ -z $emulated && $parts != build ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "nvidia-smi must find a GPU. Set EMULATED=1 to run small sizes on an emulated GPU."
    exit 2
fi

# Run a step, write its output to a log, and print the last lines.
step() {
    local name=$1 status=0
    shift
    timeout 470 "$@" >"$out/$name.log" 2>&1 || status=$?
    if [ $status = 0 ]; then passed+=("$name"); else failed+=("$name"); fi
    tail -n $((status == 0 ? 2 : 40)) "$out/$name.log"
    echo "  $name: status $status, at second $SECONDS, see $out/$name.log"
}

run_build() {
    local programs=(benchmark_gpu test_cuda_op test_cuda_kernels) options
    if [ -n "$emulated" ]; then
        options=(-DGLUON_SYNCBN_BUILD_TESTS=ON)
    else
        local generation=${GENERATION:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader)}
        generation=${generation%%$'\n'*}
        # Compiling for all generations of GPUs takes four times as long as for one.
        options=(-DGLUON_SYNCBN_CUDA=1 -DGLUON_SYNCBN_CHECKS=ON
            "-DCMAKE_CUDA_ARCHITECTURES=${generation//./}-real")
    fi
    if [[ -z $emulated || $parts = *mxnet* ]]; then programs+=("$library"); fi
    if command -v ninja >/dev/null; then options+=(-G Ninja); fi
    step configure cmake -S src -B "$build" "${options[@]}"
    step build cmake --build "$build" --parallel "$(nproc)" --target "${programs[@]}"
    [ ${#failed[@]} -eq 0 ] || exit 1
}

run_mxnet() {
    local folder=$build/mxnet
    if [ ! -d "$folder" ]; then tar -xJf "$folder.tar.xz" -C "$build"; fi
    step mxnet env GLUON_SYNCBN_LIBRARY="$build/lib$library.so" \
        LD_LIBRARY_PATH="$folder/stubs:${emulated:+$folder/emulated:}${LD_LIBRARY_PATH:-}" \
        PYTHONPATH="$folder/site:$PWD" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
        "$python" -m pytest -q tests/layer/test_gpu_contexts.py
}

for part in $parts; do
    echo "== $part"
    case $part in
    build | mxnet) "run_$part" ;;
    benchmark) step benchmark "$build/benchmark_gpu" "$size" ;;
    layer) step layer "$build/test_cuda_op" ;;
    kernels) step kernels "$build/test_cuda_kernels" "$size" ;;
    memcheck | racecheck | synccheck | initcheck) # these tools need a GPU
        if [ -z "$emulated" ] && command -v compute-sanitizer >/dev/null; then
            step "$part" compute-sanitizer --tool "$part" --error-exitcode 9 \
                "$build/test_cuda_kernels" small
        else left_out+=("$part"); fi
        ;;
    *) echo "PARTS must name parts of this script, got '$part'" && exit 2 ;;
    esac
done
echo "== passed: ${passed[*]:-none}; left out: ${left_out[*]:-none}; FAILED: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
