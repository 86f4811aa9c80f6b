"""Time torch's kernels of SyncBatchNorm beside ours, on one GPU.

    python benchmark_torch.py benchmark.log    # the output of benchmark_gpu

Each line has the layout, dtype and pass, torch's median time in microseconds, and our
time divided by torch's: below 1 ours is faster.
"""

import json
import statistics
import sys
from pathlib import Path

import torch

EPSILON, REPETITIONS = 1e-5, 30


def make_passes(outer, channels, inner, dtype):
    """Return torch's function for each pass, by our name of the pass."""

    def random():
        if inner == 1:  # channels last, as torch's networks have it
            shape = 1, outer, 1, channels
            return torch.randn(shape, device="cuda").to(dtype).permute(0, 3, 1, 2)
        return torch.randn(outer, channels, inner, 1, device="cuda").to(dtype)

    x, dy, c = random(), random(), torch.ones(channels, device="cuda")
    mean, inv_std = torch.batch_norm_stats(x, EPSILON)
    count = torch.tensor([outer * inner], dtype=torch.int32, device="cuda")
    return {
        "moments": lambda: torch.batch_norm_stats(x, EPSILON),
        "normalize": lambda: torch.batch_norm_elemt(x, c, c, mean, inv_std, EPSILON),
        "sums": lambda: torch.batch_norm_backward_reduce(
            dy, x, mean, inv_std, c, True, True, True
        ),
        "apply": lambda: torch.batch_norm_backward_elemt(
            dy, x, mean, inv_std, c, c, c, count
        ),
    }


def microseconds(run, flush):
    """Return the median time of a call; `flush` fills the second-level cache."""
    times = []
    for _ in range(3 + REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[3:])


def main():
    lines = Path(sys.argv[1]).read_text().splitlines()
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    made = None, None
    for row in map(json.loads, lines[1:]):
        if row["dtype"] == "float64" or row["pass"] == "copy":
            continue  # torch's statistics of float64 tensors have another dtype
        key = *row["shape"], row["dtype"]
        if made[0] != key:
            made = key, make_passes(*row["shape"], getattr(torch, row["dtype"]))
        time = microseconds(made[1][row["pass"]], flush)
        ratio = row["microseconds"] / time
        line = {**row, "torch_microseconds": time, "ours_to_torch": ratio}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
