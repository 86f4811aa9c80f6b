"""Times the CUDA kernels beside plain moves and PyTorch's kernels, on one GPU.

`--program` is benchmark_gpu.cc, built (scripts/check_gpu.sh does that): it verifies
and times ours, and kernels that only move the same bytes. PyTorch's are the four
kernels of its synchronized batch norm: batch_norm_stats, batch_norm_elemt,
batch_norm_backward_reduce, batch_norm_backward_elemt, timed in the same way right
behind; without PyTorch their column is missing. No other package takes part. "forward"
and "backward" are two kernels in a row, the second of which may find in the cache what
the first has read. Bytes are those that a kernel must read and write: 1, 2, 2 and 3
tensors. Writes JSON, and beside it the table of docs/guides/gpus.md.

    python scripts/benchmarks/benchmark_gpu.py --program build/gpu/benchmark_gpu
    python scripts/benchmarks/benchmark_gpu.py --program ... --shape 4,64,240,240
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

try:
    import torch
except ImportError:
    torch = None
if torch and not torch.cuda.is_available():
    torch = None

# (N, C, H, W): the layers of a dilated ResNet-50 and of its pyramid pooling, for 4
# crops of 480; then others, large and small.
SHAPES = [
    "4,64,240,240", "4,256,120,120", "4,512,60,60", "4,1024,60,60", "4,2048,60,60",
    "4,512,6,6", "4,512,1,1",
    "16,256,129,129", "32,64,256,256", "2,32,512,1024", "64,2048,7,7",
]  # fmt: skip
DTYPES = "float32", "float16"
LAYOUTS = {"contiguous": "contiguous_format", "channels-last": "channels_last"}
TENSORS = {"moments": 1, "normalize": 2, "sums": 2, "apply": 3}
# What moves as many bytes and computes nothing.
MOVES = dict(zip(TENSORS, ("read", "copy", "two_reads", "two_reads_and_a_write")))
PAIRS = {"forward": ("moments", "normalize"), "backward": ("sums", "apply")}
WARM_UP = 3  # as in benchmark_gpu.cc


class Program:
    """The program that measures ours, and what it answers."""

    def __init__(self, program, repetitions):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([program, str(repetitions)], **pipes)

    def answer(self, *question):
        """To the first call the GPU, to others what it measures of that case."""
        if question:
            print(",".join(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"benchmark_gpu.cc ended with status {self._process.wait()}")
        return json.loads(line)


class TorchKernels:
    """PyTorch's kernels on one case."""

    def __init__(self, shape, dtype, layout):
        options = {"dtype": getattr(torch, dtype), "device": "cuda"}
        options["memory_format"] = getattr(torch, LAYOUTS[layout])
        x, dy = (torch.empty(shape, **options).normal_(mean, 1) for mean in (3.0, 0.0))
        gamma, beta = torch.rand(2, shape[1], device="cuda") + 0.5
        mean, inv_std = torch.batch_norm_stats(x, 1e-5)
        count = torch.tensor([x.numel() // shape[1]], dtype=torch.int32, device="cuda")
        backward = dy, x, mean, inv_std, gamma

        def reduce():
            return torch.batch_norm_backward_reduce(*backward, True, True, True)

        sums = reduce()[:2]
        self.steps = {
            "moments": lambda: torch.batch_norm_stats(x, 1e-5),
            "normalize": lambda: torch.batch_norm_elemt(
                x, gamma, beta, mean, inv_std, 1e-5
            ),
            "sums": reduce,
            "apply": lambda: torch.batch_norm_backward_elemt(*backward, *sums, count),
        }
        for pair, steps in PAIRS.items():
            both = [self.steps[name] for name in steps]
            self.steps[pair] = lambda both=both: [step() for step in both]

    def times(self, flush, repetitions):
        """Median microseconds of each step."""
        return {
            name: round(1e6 * self._seconds(step, flush, repetitions), 3)
            for name, step in self.steps.items()
        }

    def _seconds(self, step, flush, repetitions):
        times = []
        for repetition in range(WARM_UP + repetitions):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.fill_(repetition % 256)
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[WARM_UP:])


def row_of(ours, torch_times):
    """One row of the results: all times are microseconds."""
    row = {key: ours.pop(key) for key in ("shape", "dtype", "layout")}
    size = ours.pop("bytes")
    rates = {name: n * size / ours[name] / 1e3 for name, n in TENSORS.items()}
    row["ours"], row["torch"] = ours, torch_times
    row["gb_s"] = {name: round(rate, 1) for name, rate in rates.items()}
    row["plain"] = {name: ours.pop(move) for name, move in MOVES.items()}
    row["of_plain"] = {n: round(row["plain"][n] / ours[n], 3) for n in TENSORS}
    for times in filter(None, (ours, torch_times)):
        times["all"] = round(times["forward"] + times["backward"], 3)
    return row


def cells_of(row):
    """A line of the table, as texts."""
    cells = [str(tuple(row["shape"])), row["dtype"], row["layout"]]
    ours, other = row["ours"], row["torch"]
    for name in [*TENSORS, "all"]:
        share = f" ({row['of_plain'][name]:.0%})" if name in TENSORS else ""
        beside = f" / {other[name]:.1f}" if other else ""
        cells.append(f"{ours[name]:.1f}{share}{beside}")
    if other:
        cells.append(f"{other['all'] / ours['all']:.2f} x")
    return cells


def table_of(document):
    """The table of docs/guides/gpus.md."""
    machine = document["machine"]
    heads = ["shape", "dtype", "layout", *TENSORS, "all"]
    beside = ""
    if document["rows"] and document["rows"][0]["torch"]:
        heads.append("faster")
        beside = f", and behind the slash those of PyTorch {machine['torch']}"
    lines = [
        f"Microseconds on one {machine['gpu']}, in brackets the speed as a share of "
        f"that of a kernel which only moves the same bytes{beside}: medians of "
        f"{document['repetitions']} repetitions.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for row in document["rows"]:
        lines.append("| " + " | ".join(cells_of(row)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="N,C,H,W")
    parser.add_argument("--repetitions", type=int, default=30)
    results = Path(__file__).parents[1] / "results" / "benchmark_gpu.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    cases = list(itertools.product(options.shape, DTYPES, LAYOUTS))
    program = Program(options.program, options.repetitions)
    gpu = program.answer()
    machine = {"system": platform.platform(), "python": platform.python_version()}
    machine.update(gpu)
    flush = None
    if torch:
        machine.update(torch=torch.__version__, torch_cuda=torch.version.cuda)
        flush = torch.empty(5 * gpu["l2_bytes"], dtype=torch.uint8, device="cuda")
    rows = []
    for shape, dtype, layout in cases:
        ours, times = program.answer(shape, dtype, layout), None
        if torch:
            sizes = [int(n) for n in shape.split(",")]
            kernels = TorchKernels(sizes, dtype, layout)
            times = kernels.times(flush, options.repetitions)
        rows.append(row_of(ours, times))
        print("  ".join(cells_of(rows[-1])), flush=True)
    document = {"machine": machine, "repetitions": options.repetitions, "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    table = options.output.with_suffix(".md")
    table.write_text(table_of(document))
    print(f"written to {options.output} and {table}")


if __name__ == "__main__":
    main()
