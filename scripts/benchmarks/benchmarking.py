"""Functions of all benchmarks: time in turns, compute medians, write JSON."""

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gluon_syncbn

import mxnet as mx
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.helpers import MODES, set_mode  # noqa: E402, F401

RESULTS = Path(__file__).parents[1] / "results"


def take_turns(steps, repetitions, warm_up=3):
    """Return seconds of each of `steps`, timed in turns so that all share the noise."""
    times = {name: [] for name in steps}
    for repetition in range(warm_up + repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def statistics(seconds):
    """Return the median, 10th and 90th percentile (ms) and the number of times."""
    names = "p10_ms", "median_ms", "p90_ms"
    values = np.percentile(seconds, [10, 50, 90]) * 1e3
    rounded = {name: round(float(ms), 4) for name, ms in zip(names, values)}
    return {**rounded, "repetitions": len(seconds)}


def parser_of(name, description, repetitions):
    """Return a parser with the common options of benchmarks."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    return parser


def copy_bandwidth(megabytes=256):
    """Return GB/s that a copy with a thread for each core reads and writes."""
    cores = len(os.sched_getaffinity(0))
    source = np.ones(megabytes * 2**20, np.uint8)
    shares = [np.array_split(array, cores) for array in (source.copy(), source)]
    with ThreadPoolExecutor(cores) as pool:  # NumPy releases the interpreter's lock
        copy = {"copy": lambda: list(pool.map(np.copyto, *shares))}
        seconds = take_turns(copy, repetitions=9)["copy"]
    return round(2 * source.nbytes / np.median(seconds) / 1e9, 2)


def machine():
    """Return the hardware and the versions of this run."""
    names = sorted(os.environ)
    prefixes = "OMP_", "MXNET_", "GLUON_SYNCBN_"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "gluon_syncbn": gluon_syncbn.__version__,
        "numpy": np.__version__,
        "instruction_set": gluon_syncbn.features()["instruction_set"],
        "environment": {n: os.environ[n] for n in names if n.startswith(prefixes)},
    }


def write(path, rows, *columns, **facts):
    """Print some columns of the rows. Write all, the machine and `facts` as JSON."""
    for row in rows:
        print("  ".join(str(row[name]) for name in columns))
    head = json.dumps({"machine": machine(), **facts}, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"written to {path}")
