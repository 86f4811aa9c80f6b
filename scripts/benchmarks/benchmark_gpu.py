"""Time the CUDA kernels on one GPU beside cudaMemcpy and PyTorch's layer.

`--program` is the built benchmark_gpu.cc (scripts/check_gpu.sh builds it). It verifies
and times each of the four passes, all passes in a row, and the copy of a tensor. If
PyTorch for the GPU is installed, torch.nn.BatchNorm2d is timed in the same way. The
script writes JSON and, beside it, the table of docs/design/gpus.md.

    python scripts/benchmarks/benchmark_gpu.py --program build/gpu/benchmark_gpu
"""

import argparse
import itertools
import json
import statistics
import subprocess
from pathlib import Path

try:
    import torch
except ImportError:
    torch = None

# (N, C, H, W): layers of a dilated ResNet-50 for 4 crops of 480, and two others.
SHAPES = ["4,64,240,240", "4,256,120,120", "4,2048,60,60", "4,512,6,6"]
SHAPES += ["16,256,129,129", "64,2048,7,7"]
DTYPES, LAYOUTS = ("float32", "float16"), ("contiguous", "channels-last")
TENSORS = {"moments": 1, "normalize": 2, "sums": 2, "apply": 3}  # read or written


def microseconds_of_pytorch(case, flush, repetitions):
    """Return the median of forward and backward of PyTorch's layer."""
    last = case["layout"] == "channels-last"
    order = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(case["shape"], dtype=getattr(torch, case["dtype"]), device="cuda")
    x, dy = x.to(memory_format=order).requires_grad_(), x.to(memory_format=order)
    layer, times = torch.nn.BatchNorm2d(x.shape[1]).cuda(), []
    for repetition in range(3 + repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.fill_(repetition % 256)
        begin.record()
        torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[3:])


def cells_of(row):
    """Return a row of the table; shares are relative to the copy's bandwidth."""
    cells = [f"{row['shape']}", row["dtype"], row["layout"], f"{row['copy']:.1f}"]
    for name, tensors in TENSORS.items():
        share = tensors / 2 * row["copy"] / row[name]
        cells.append(f"{row[name]:.1f} ({share:.0%})")
    return cells + [f"{row[name]:.1f}" for name in ("all", "pytorch") if name in row]


def table_of(machine, rows):
    heads = ["shape", "dtype", "layout", "cudaMemcpy", *TENSORS, "all"]
    heads += ["PyTorch's layer"] * ("pytorch" in rows[0])
    lines = [heads, ["---"] * len(heads), *map(cells_of, rows)]
    about = (
        f"Median microseconds on one {machine['gpu']}. The percentage is the bandwidth "
        "relative to cudaMemcpy."
    )
    return "\n".join([about, "", *(f"| {' | '.join(c)} |" for c in lines), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="N,C,H,W")
    parser.add_argument("--repetitions", type=int, default=30)
    results = Path(__file__).parents[1] / "results" / "benchmark_gpu.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    cases = map(",".join, itertools.product(options.shape, DTYPES, LAYOUTS))
    command = [options.program, str(options.repetitions), *cases]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    machine, *rows = map(json.loads, lines.splitlines())
    if torch and torch.cuda.is_available():
        machine.update(torch=torch.__version__, torch_cuda=torch.version.cuda)
        flush = torch.empty(5 * machine["l2_bytes"], dtype=torch.uint8, device="cuda")
        for row in rows:
            row["pytorch"] = microseconds_of_pytorch(row, flush, options.repetitions)
    document = {"machine": machine, "repetitions": options.repetitions, "rows": rows}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table_of(machine, rows))
    print(f"written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
