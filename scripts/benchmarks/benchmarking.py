"""Functions that the benchmarks share."""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import gluon_syncbn

import mxnet as mx
import numpy as np

SCRIPTS = Path(__file__).resolve().parents[1]
# Benchmarks import modules of scripts and of tests/support.
sys.path += [str(SCRIPTS), str(SCRIPTS.parent / "tests")]


def run(name, description, cases, table):
    """Run a benchmark from the command line.

    Each of `cases(quick)` has environment variables, a function and its arguments. The
    function returns rows of results from a new process with these variables. All rows
    are written as JSON with a description of the machine, and `table(path)` is printed.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure a tiny size")
    parser.add_argument("--output", type=Path, default=SCRIPTS / f"results/{name}.json")
    options, rows = parser.parse_args(), []
    spawn = multiprocessing.get_context("spawn")
    for variables, *call in cases(options.quick):
        variables = {"GLUON_SYNCBN_KEEP_MEMORY": "1", **variables}
        with mock.patch.dict(os.environ, variables):
            with ProcessPoolExecutor(1, spawn) as pool:
                rows += pool.submit(*call).result()
    head = json.dumps({"machine": machine(), "copy_gb_s": copy_bandwidth()}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    options.output.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
    print(table(options.output.absolute()))


def take_turns(steps, repetitions, warm_up=3):
    """Time `steps` in turns, so that all share the noise. Return seconds by name."""
    times = {name: [] for name in steps}
    for repetition in range(warm_up + repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def statistics(seconds):
    """Return the median (ms), and the number of repetitions."""
    median = round(float(np.median(seconds)) * 1e3, 4)
    return {"median_ms": median, "repetitions": len(seconds)}


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
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    prefixes = "OMP_", "MXNET_", "GLUON_SYNCBN_"
    variables = {n: v for n, v in os.environ.items() if n.startswith(prefixes)}
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "gluon_syncbn": gluon_syncbn.__version__,
        "numpy": np.__version__,
        "instruction_set": gluon_syncbn.features()["instruction_set"],
        "environment": variables,
    }
