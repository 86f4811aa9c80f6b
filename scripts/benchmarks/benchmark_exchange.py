#!/usr/bin/env python3
"""Measures the latency of exchanges between 1 to 4 processes of this machine.

    python scripts/benchmarks/benchmark_exchange.py  # writes scripts/results/

Exchanges are sums of arrays of 1 to 16 KB: as layers make them ("layer"), and mpi4py's
MPI_Allreduce, which matches by order and never times out. Each is verified before it is
timed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from gluon_syncbn import distributed
from gluon_syncbn.native.library import load

import benchmarking
import numpy as np
from mpi4py import MPI

KILOBYTES = 1, 4, 16
PROCESSES = 1, 2, 3, 4


def calls_of(array):
    """Both ways to add up an array over the processes, by name."""
    library, comm, total = load(), MPI.COMM_WORLD.Dup(), np.empty_like(array)

    def layer():
        total[:] = array
        values = total.ctypes.data, total.size
        assert library.gluon_syncbn_distributed_sum("benchmark", "", *values, 60.0) == 0
        return total

    def mpi():
        comm.Allreduce(array, total)
        return total

    return {"layer": layer, "MPI_Allreduce": mpi}


def measure(repetitions):
    """Rows of results; runs on every rank."""
    distributed.init()
    rows = []
    for kilobytes in KILOBYTES:
        array = np.arange(kilobytes * 128, dtype=np.float64)
        calls = calls_of(array)
        for call in calls.values():
            np.testing.assert_array_equal(call(), array * distributed.size())
        times = benchmarking.take_turns(calls, repetitions, repetitions // 10)
        for kind, seconds in times.items():
            row = {"kind": kind, "processes": distributed.size()}
            row.update(benchmarking.statistics(seconds), kilobytes=kilobytes)
            rows.append(row)
    return rows


def launcher():
    """mpirun, and the options that Open MPI's needs here."""
    beside = Path(sys.executable).with_name("mpirun")
    command = [str(beside) if beside.exists() else "mpirun"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if "HYDRA" not in version.stdout:
        command += ["--allow-run-as-root", "--oversubscribe"]
    return command


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    benchmarking.add_output(parser, "benchmark_exchange")
    options = parser.parse_args()
    if options.rank:
        rows = measure(options.repetitions)
        if distributed.rank() == 0:
            options.output.write_text(json.dumps(rows))
        return
    rows = []
    for count in PROCESSES:
        command = *launcher(), "-n", str(count)
        rows += benchmarking.run_apart("--rank", launcher=command)
    benchmarking.print_rows(rows, "kind", "processes", "kilobytes", "median_ms")
    benchmarking.write(options.output, rows)


if __name__ == "__main__":
    main()
