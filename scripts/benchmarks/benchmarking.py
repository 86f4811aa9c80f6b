"""Parts of all benchmark scripts: processes, medians, bandwidth, the machine, JSON.

Called by the scripts beside it and by the ablation. It must not know what is measured.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import mxnet as mx
import numpy as np

import gluon_syncbn
from gluon_syncbn.tools.bench import take_turns

# Arguments of hybridize for each mode of a Gluon net; None is imperative.
MODES = {
    "imperative": None,
    "hybridize": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


def in_processes(counts, output):
    """Runs the calling script once for each number of contexts; joins what they write.

    Contexts share the cores, so each run has cores / contexts OpenMP threads, as users
    are told to set it. The script measures where OMP_NUM_THREADS is set. What is not in
    rows is that of the first number.
    """
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            threads = max(1, len(os.sched_getaffinity(0)) // count)
            part = Path(folder) / f"{count}.json"
            options = "--contexts", str(count), "--output", str(part)
            result = subprocess.run(
                [sys.executable, *sys.argv, *options],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
            if result.returncode != 0:
                sys.exit(result.returncode)
            documents.append(json.loads(part.read_text()))
    document = documents[0]
    machine = document["machine"]
    machine["environment"]["OMP_NUM_THREADS"] = "cores / contexts, at least 1"
    document["rows"] = [row for part in documents for row in part["rows"]]
    write(output, document)


def set_mode(net, mode):
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])


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
    threads = len(os.sched_getaffinity(0))
    source = np.ones(megabytes * 2**20 // 4, np.float32)
    target = np.zeros_like(source)
    sources, targets = (np.array_split(array, threads) for array in (source, target))
    with ThreadPoolExecutor(threads) as pool:
        steps = {
            "copy": lambda: list(pool.map(np.copyto, targets, sources)),
            "read": lambda: list(pool.map(np.max, sources)),
        }
        times = take_turns(steps, repetitions)
    copy, read = (source.nbytes / np.median(times[k]) / 1e9 for k in ("copy", "read"))
    return {
        "copy_gb_s": round(2 * copy, 2),
        "read_gb_s": round(read, 2),
        "threads": threads,
    }


def add_output(parser, name):
    """--output, by default the committed JSON."""
    output = Path(__file__).parents[1] / "results" / f"{name}.json"
    parser.add_argument("--output", type=Path, default=output)


def add_options(parser, name):
    """--output, and --return-memory for `keep_memory`."""
    add_output(parser, name)
    parser.add_argument(
        "--return-memory",
        action="store_true",
        help="measure with GLUON_SYNCBN_KEEP_MEMORY=0",
    )


def keep_memory(options):
    """Keeps freed memory unless told not to; what a document says of it."""
    if options.return_memory:
        os.environ["GLUON_SYNCBN_KEEP_MEMORY"] = "0"
    return "kept" if gluon_syncbn.keep_freed_memory() else "returned"


def machine():
    """Hardware and versions that a figure belongs to."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache": _last_level_cache(),
        "memory_gb": round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1
        ),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "gluon_syncbn": gluon_syncbn.__version__,
        **_versions("numpy", "gluoncv", "torch"),
        "instruction_set": gluon_syncbn.features()["instruction_set"],
        "environment": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(("OMP_", "MXNET_", "GLUON_SYNCBN_"))
        },
    }


def print_rows(rows, *columns):
    """Prints these columns of some rows as a table."""
    lines = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths))
        print("  ".join(cells), flush=True)


def write(path, document):
    """Writes a document and the machine as JSON, a line for each of the rows."""
    document = {"machine": machine(), **document}
    lines = [f"  {json.dumps(row)}" for row in document["rows"]]
    head = {name: value for name, value in document.items() if name != "rows"}
    head = json.dumps(head, indent=1)[:-2]  # without the closing brace
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + ',\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n")
    print(f"written to {path}")


def _versions(*packages):
    """Versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _last_level_cache():
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return caches[-1].read_text().strip() if caches else None


def _processor():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
