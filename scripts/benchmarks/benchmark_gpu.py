"""Times the CUDA kernels and a small layer on one GPU, beside plain moves and PyTorch.

`--program` is benchmark_gpu.cc, built (scripts/check_gpu.sh does that): it verifies
and times ours, and kernels that only move the same bytes. PyTorch's kernels and layers
(pytorch_gpu.py) are timed in the same way right after; without PyTorch their columns
are missing. No other package is timed. "forward" and "backward" are two kernels in a
row, the second of which may find in the cache what the first has read. Bytes are those
that a kernel must read and write: 1, 2, 2 and 3 tensors. Forwards of a small layer are
timed from the host, with threads as devices. Writes JSON after each result, and beside
it the tables of docs/guides/gpus.md.

    python scripts/benchmarks/benchmark_gpu.py --program build/gpu/benchmark_gpu
    python scripts/benchmarks/benchmark_gpu.py --program ... --shape 4,64,240,240
"""

import argparse
import itertools
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytorch_gpu

# (N, C, H, W): the layers of a dilated ResNet-50 and of its pyramid pooling, for 4
# crops of 480; then others, large and small.
SHAPES = [
    "4,64,240,240", "4,256,120,120", "4,512,60,60", "4,1024,60,60", "4,2048,60,60",
    "4,512,6,6", "4,512,1,1",
    "16,256,129,129", "32,64,256,256", "2,32,512,1024", "64,2048,7,7",
]  # fmt: skip
DTYPES = "float32", "float16"
LAYOUTS = "contiguous", "channels-last"
TENSORS = {"moments": 1, "normalize": 2, "sums": 2, "apply": 3}
# What moves as many bytes and computes nothing.
MOVES = dict(zip(TENSORS, ("read", "copy", "two_reads", "two_reads_and_a_write")))
DEVICES = 1, 2, 4  # of the forwards that are timed by phase
PHASES = "begin", "moments", "rendezvous", "normalize", "finish"


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


def row_of(ours, torch_times):
    """One row of the results: all times are microseconds."""
    row = {key: ours.pop(key) for key in ("shape", "dtype", "layout")}
    size = ours.pop("bytes")
    rates = {name: n * size / ours[name] / 1e3 for name, n in TENSORS.items()}
    ours["all"] = round(ours["forward"] + ours["backward"], 3)
    row["ours"], (row["torch"], row["torch_layers"]) = ours, torch_times
    row["gb_s"] = {name: round(rate, 1) for name, rate in rates.items()}
    row["plain"] = {name: ours.pop(move) for name, move in MOVES.items()}
    row["of_plain"] = {n: round(row["plain"][n] / ours[n], 3) for n in TENSORS}
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
    cells += [f"{times['all']:.1f}" for times in row["torch_layers"].values()]
    return cells


def phases_of(times):
    """A line of the table of forwards, as texts."""
    return [str(times["devices"]), *(f"{times[name]:.1f}" for name in PHASES)]


def table(heads, lines):
    """A table in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def tables_of(document):
    """The tables of docs/guides/gpus.md."""
    machine, rows = document["machine"], document["rows"]
    heads, beside = ["shape", "dtype", "layout", *TENSORS, "all"], ""
    if rows and rows[0]["torch"]:
        heads += ["faster", *rows[0]["torch_layers"]]
        beside = (
            f", and after the slash those of PyTorch {machine['torch']}, whose layers "
            "are the last columns, forward and backward with what the host adds"
        )
    lines = [
        f"Microseconds on one {machine['gpu']}, in brackets the speed as a share of "
        f"that of a kernel which only moves the same bytes{beside}: medians of "
        f"{document['repetitions']} repetitions.",
        "",
        *table(heads, map(cells_of, rows)),
    ]
    forwards = document["forwards"]
    if forwards:
        lines += [
            "",
            "Microseconds of a forward of (2, 64, 8, 8) in float32, seen from the "
            f"host: medians of {forwards[0]['forwards']} forwards on each device. "
            "Devices are threads, all on the one GPU.",
            "",
            *table(["devices", *PHASES], map(phases_of, forwards)),
        ]
    return "\n".join(lines) + "\n"


def write(document, output):
    """Writes all results so far: what a time limit ends has left its figures."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    output.with_suffix(".md").write_text(tables_of(document))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="N,C,H,W")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--forwards", type=int, default=1000, help="0 for none")
    results = Path(__file__).parents[1] / "results" / "benchmark_gpu.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    program = Program(options.program, options.repetitions)
    gpu = program.answer()
    machine = {"system": platform.platform(), "python": platform.python_version()}
    machine.update(gpu)
    torch, beside = pytorch_gpu.torch, None
    if torch:
        machine.update(torch=torch.__version__, torch_cuda=torch.version.cuda)
        beside = pytorch_gpu.PyTorch(5 * gpu["l2_bytes"], options.repetitions)
    document = {"machine": machine, "repetitions": options.repetitions}
    document.update(rows=[], forwards=[])
    for shape, dtype, layout in itertools.product(options.shape, DTYPES, LAYOUTS):
        ours, times = program.answer(shape, dtype, layout), (None, {})
        if beside:
            sizes = [int(n) for n in shape.split(",")]
            times = beside.times(sizes, dtype, layout)
        document["rows"].append(row_of(ours, times))
        write(document, options.output)
        print("  ".join(cells_of(document["rows"][-1])), flush=True)
    for devices in DEVICES if options.forwards else ():
        times = program.answer("forwards", str(devices), str(options.forwards))
        document["forwards"].append(times)
        write(document, options.output)
        print(times, flush=True)
    print(f"written to {options.output} and {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
