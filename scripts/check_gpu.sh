#!/usr/bin/env bash
# Everything that needs a GPU, in one command: builds the library, checks it under pytest and
# compute-sanitizer, and measures it. Needs nvcc, cmake, and a python3 with PyTorch and pytest; no MXNet.
#
#     bash scripts/check_gpu.sh OUT
#
# OUT receives the logs and benchmark_gpu.json. PARTS chooses among "build tests sanitizers benchmark".
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?where logs go}" && cd "$1" && pwd)
parts=" ${PARTS:-build tests sanitizers benchmark} "
python=${PYTHON:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "skipped: $python has no PyTorch that sees a CUDA device"
    exit 0
fi
wanted() { [[ $parts == *" $1 "* ]]; }
build=${BUILD:-build/gpu}
export GLUON_SYNCBN_LIBRARY=$PWD/$build/libgluon_syncbn.so
failed=()
# Runs one part; its output goes to a log of its own, and its end to the terminal.
part() {
    local name=$1
    shift
    echo "== $name"
    if "$@" >"$out/$name.log" 2>&1; then tail -n 3 "$out/$name.log"; else
        failed+=("$name")
        tail -n 40 "$out/$name.log"
    fi
}

if wanted build; then
    # Only for the GPU at hand: that takes a quarter of the time.
    generation=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
    part configure cmake -S src -B "$build" -G Ninja -DGLUON_SYNCBN_CUDA=1 \
        "-DCMAKE_CUDA_ARCHITECTURES=$generation-real"
    part build cmake --build "$build"
fi
pytest=("$python" -m pytest --confcutdir tests/gpu -p no:cacheprovider -q tests/gpu)
if wanted tests; then part tests "${pytest[@]}"; fi
if wanted sanitizers; then
    # A part of the checks, because the tools slow kernels down a hundredfold; two dtypes, which all
    # kernels' templates are made for. Memory in allocations of its own, so that memcheck knows its ends.
    some="(test_layer_on_one_device and 0.0 or test_devices_equal and write)"
    some="$some and (float32 or float16) and not bfloat16"
    some="$some and not 40000 and not 300001 and not 28800"
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck synccheck; do
        part "$tool" timeout 150 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "${pytest[@]}" -x -k "$some"
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
fi
if wanted benchmark; then
    part benchmark "$python" scripts/benchmark_gpu.py --output "$out/benchmark_gpu.json"
    cat "$out/benchmark.log"
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
echo "all parts passed:$parts"
