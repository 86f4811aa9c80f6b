"""What the benchmark scripts share: taking turns, medians, bandwidth, the machine.

Called by scripts/benchmark_*.py. It must not know what is measured.
"""

import os
import platform
import time
from pathlib import Path

import mxnet as mx
import numpy as np

import gluon_syncbn


def interleave(steps, repetitions, warm_up=3):
    """Seconds of each of `steps` (name to function), which take turns.

    Returns
    -------
    dict
        Name to a list of `repetitions` times in seconds.
    """
    times = {name: [] for name in steps}
    for repetition in range(warm_up + repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def statistics(seconds):
    """Median, 10th and 90th percentile in milliseconds, and the count."""
    low, median, high = np.percentile(seconds, [10, 50, 90]) * 1e3
    return {
        "median_ms": round(float(median), 4),
        "p10_ms": round(float(low), 4),
        "p90_ms": round(float(high), 4),
        "repetitions": len(seconds),
    }


def bandwidth(megabytes=256, repetitions=9):
    """Memory bandwidth of one process with all its threads, in GB/s.

    ``copy``: bytes read plus bytes written of a parallel memory copy; ``read``: bytes
    read of a parallel maximum. NumPy in one thread per core; it releases the
    interpreter lock.
    """
    from concurrent.futures import ThreadPoolExecutor

    threads = len(os.sched_getaffinity(0))
    source = np.ones(megabytes * 2**20 // 4, np.float32)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads)))
    with ThreadPoolExecutor(threads) as pool:
        times = interleave(
            {
                "copy": lambda: list(pool.map(lambda p: np.copyto(p[1], p[0]), parts)),
                "read": lambda: list(pool.map(lambda p: p[0].max(), parts)),
            },
            repetitions,
        )
    return {
        "copy_gb_s": round(2 * source.nbytes / np.median(times["copy"]) / 1e9, 2),
        "read_gb_s": round(source.nbytes / np.median(times["read"]) / 1e9, 2),
        "threads": threads,
    }


def machine():
    """Hardware and versions that a figure belongs to."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "gluon_syncbn": gluon_syncbn.__version__,
        "instruction_set": gluon_syncbn.features()["instruction_set"],
        "environment": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(("OMP_", "MXNET_", "GLUON_SYNCBN_"))
        },
    }


def _processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
