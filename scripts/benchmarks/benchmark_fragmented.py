"""Times the first steps of a layer on a machine whose free memory is in pieces.

An output of 30 MB takes huge pages. Where free memory is in pieces, the system makes
them by moving other pages, in the middle of a step. Each row is a process that times
its first steps, forward plus backward, with memory as it is found and with memory in
pieces, by itself and beside processes that keep a core busy each.

    python scripts/benchmarks/benchmark_fragmented.py  # Linux; some minutes

To break memory into pieces it takes all that is free in small pages, and frees every
other 64 KB again; it is the first to be killed if memory gets short. Do not run it
beside work that matters. Writes scripts/results/benchmark_fragmented.json.
"""

import argparse
import contextlib
import itertools
import json
import mmap
import statistics
import subprocess
import sys
import time
from pathlib import Path

import benchmarking
import candidates
import mxnet as mx
import numpy as np

import gluon_syncbn
from gluon_syncbn.tools import bench

LAYERS = ["gluon_syncbn", "BatchNorm"]
MODES = ["static_shape", "imperative"]
SHAPE = 8, 256, 60, 60
POPULATE_WRITE = 23  # of <sys/mman.h>


def first_steps(layer, mode, steps):
    """Milliseconds of each of a new net's first steps."""
    rng, times = np.random.default_rng(0), []
    x, dy = (rng.standard_normal(SHAPE, "float32") for _ in range(2))
    with gluon_syncbn.Devices(mx.cpu()) as devices:
        candidate = candidates.make(layer, "inside", mode, devices, x, dy)
        mx.nd.waitall()
        for _ in range(steps):
            start = time.perf_counter()
            candidate.step()
            times.append(round(1e3 * (time.perf_counter() - start), 2))
        # First steps can be verified only after them.
        bench.verify(layer, candidate, 1, bench.whole_batch(x, dy))
    return times


def free_huge_pages():
    """Those of 2 MB that the system could hand out at once."""
    with open("/proc/buddyinfo", encoding="ascii") as file:
        free = [list(map(int, line.split("zone")[1].split()[1:])) for line in file]
    return sum(n * 2**order for zone in free for order, n in enumerate(zone[9:]))


def available_bytes():
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(1024 * int(s.split()[1]) for s in file if "MemAvailable" in s)


@contextlib.contextmanager
def memory_in_pieces(block=256 * 2**20, piece=64 * 2**10):
    """Inside, half of the free memory is free, and hardly a huge page of it."""
    with contextlib.ExitStack() as stack:
        taken = []
        while free_huge_pages() > 8 and available_bytes() > 2 * block:
            memory = mmap.mmap(-1, block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            taken.append(stack.enter_context(memory))
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory.madvise(POPULATE_WRITE)
        for memory, offset in itertools.product(taken, range(0, block, 2 * piece)):
            memory.madvise(mmap.MADV_DONTNEED, offset, piece)
        yield


def measure(layer, mode, steps):
    """`first_steps` in another process."""
    command = [sys.executable, __file__, "--child", layer, mode, "--steps", str(steps)]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def rows(steps):
    for busy, pieces in itertools.product((0, 1, 2), (False, True)):
        with contextlib.ExitStack() as stack:
            for _ in range(busy):
                process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(process.kill)
            for mode, layer in itertools.product(MODES, LAYERS):
                with memory_in_pieces() if pieces else contextlib.nullcontext():
                    huge = free_huge_pages()
                    times = measure(layer, mode, steps)
                yield {
                    "layer": layer,
                    "mode": mode,
                    "memory": "in pieces" if pieces else "as found",
                    "busy_processes": busy,
                    "free_huge_pages": huge,
                    "median_ms": statistics.median(times),
                    "longest_ms_after_the_first": max(times[1:]),
                    "steps_ms": times,
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    benchmarking.add_output(parser, "benchmark_fragmented")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(first_steps(*options.child, options.steps)))
        return
    Path("/proc/self/oom_score_adj").write_text("1000")
    settings = Path("/sys/kernel/mm/transparent_hugepage")
    document = {"shape": list(SHAPE), "rows": []}
    for name in "enabled", "defrag":
        document[f"transparent_hugepage_{name}"] = (settings / name).read_text().strip()
    for row in rows(options.steps):
        document["rows"].append(row)
        print(*list(row.values())[:-1], flush=True)
    benchmarking.write(options.output, document)


if __name__ == "__main__":
    main()
