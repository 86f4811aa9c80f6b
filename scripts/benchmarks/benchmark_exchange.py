#!/usr/bin/env python3
"""Measures the latency of exchanges, and estimates their cost in a step of many ranks.

    python scripts/benchmarks/benchmark_exchange.py  # writes scripts/results/

Measures the exchange between 1 to 4 processes of this machine from array to array, for
1 to 16 KB, verified before it is timed, and fits the model of exchange_model.py to it.
The JSON states what that assumes.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import benchmarking
import exchange_model
import numpy as np

from gluon_syncbn import distributed
from gluon_syncbn.native.library import load
from gluon_syncbn.tools.bench import take_turns

KILOBYTES = (1, 4, 16)


def percentiles(seconds):
    low, median, high, tail = np.percentile(seconds, [10, 50, 90, 99]) * 1e6
    return {
        "p10_us": round(float(low), 1),
        "median_us": round(float(median), 1),
        "p90_us": round(float(high), 1),
        "p99_us": round(float(tail), 1),
        "repetitions": len(seconds),
    }


def measure_processes(output, repetitions):
    """Runs on every rank: the exchange from array to array; rank 0 writes."""
    distributed.init()
    library, results = load(), []
    for kilobytes in KILOBYTES:
        array = np.arange(kilobytes * 128, dtype=np.float64)
        total = np.empty_like(array)
        size = ctypes.c_int64()

        def native(array=array, total=total, size=size):
            library.gluon_syncbn_distributed_exchange(
                *("benchmark", "", "sum_float64", array.ctypes.data, array.nbytes),
                *(60.0, ctypes.byref(size)),
            )
            library.gluon_syncbn_distributed_result(total.ctypes.data)

        native()
        np.testing.assert_array_equal(total, array * distributed.size())
        row = {"processes": distributed.size(), "kilobytes": kilobytes}
        calls = {"native": native, "python": lambda a=array: distributed.allreduce(a)}
        for name, call in calls.items():
            times = take_turns({name: call}, repetitions, warm_up=repetitions // 10)
            row[name] = percentiles(times[name])
        results.append(row)
    if distributed.rank() == 0:
        Path(output).write_text(json.dumps(results))


def launch(processes, repetitions):
    beside = Path(sys.executable).with_name("mpirun")
    launcher = [str(beside) if beside.exists() else "mpirun"]
    version = subprocess.run([*launcher, "--version"], capture_output=True, text=True)
    if "HYDRA" not in version.stdout:
        launcher += ["--allow-run-as-root", "--oversubscribe"]
    with tempfile.NamedTemporaryFile() as output:
        program = [sys.executable, __file__, "--rank-output", output.name]
        subprocess.run(
            [*launcher, "-n", str(processes), *program]
            + ["--repetitions", str(repetitions)],
            check=True,
            timeout=300,
        )
        return json.loads(Path(output.name).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    benchmarking.add_output(parser, "benchmark_exchange")
    options = parser.parse_args()
    if options.rank_output:
        measure_processes(options.rank_output, options.repetitions)
        return
    processes = [r for n in (1, 2, 3, 4) for r in launch(n, options.repetitions)]
    cores = len(os.sched_getaffinity(0))
    fitted = exchange_model.fit(processes, cores)
    data = {
        "machine": benchmarking.machine(),
        "processes": processes,
        "fit": fitted,
        "assumptions": [
            f"Fitted to runs of 2 to {cores} processes on {cores} cores: "
            f"{fitted['latency_us']} us and {fitted['bandwidth_gb_s']} GB/s a round, "
            "within one machine. More processes than cores take turns and are not "
            "fitted.",
            "The model: every layer makes one exchange in forward and one in backward, "
            "none of them overlap each other or computation, all ranks come at once, "
            "and each of log2(ranks) rounds costs the same. The time that a rank waits "
            "for slower ones is not included. The two networks are assumed, not "
            "measured.",
        ],
        "model": exchange_model.predict(fitted),
    }
    options.output.write_text(json.dumps(data, indent=1) + "\n")
    times = "median_us", "p90_us", "p99_us"
    for kind in "native", "python":
        rows = [{**row, **row[kind]} for row in processes]
        print(f"{kind} exchange of processes")
        benchmarking.print_rows(rows, "processes", "kilobytes", *times)
    benchmarking.print_rows(data["model"], "net", "link", "ranks", "milliseconds")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
