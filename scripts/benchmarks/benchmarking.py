"""Parts of all benchmark scripts: taking turns, medians, the machine, JSON."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gluon_syncbn

import mxnet as mx
import numpy as np

# Arguments of hybridize for each mode of a Gluon net; None is imperative.
MODES = {
    "imperative": None,
    "hybridize": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


def set_mode(net, mode):
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])


def take_turns(steps, repetitions, warm_up=3):
    """Seconds of each of `steps`; they take turns, so noise affects all equally."""
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


def run_apart(*options, launcher=(), **environment):
    """Runs the calling script again with more options; returns the JSON it wrote."""
    with tempfile.NamedTemporaryFile() as output:
        command = [*launcher, sys.executable, *sys.argv, *options]
        process = subprocess.run(
            [*command, "--output", output.name],
            env={**os.environ, **environment},
            timeout=1500,
        )
        if process.returncode:
            sys.exit(process.returncode)  # it has said why
        return json.loads(Path(output.name).read_text())


def add_output(parser, name):
    """--output, by default the committed JSON."""
    output = Path(__file__).parents[1] / "results" / f"{name}.json"
    parser.add_argument("--output", type=Path, default=output)


def machine():
    """Hardware and versions that a figure belongs to."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    settings = {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(("OMP_", "MXNET_", "GLUON_SYNCBN_"))
    }
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "gluon_syncbn": gluon_syncbn.__version__,
        "numpy": np.__version__,
        "instruction_set": gluon_syncbn.features()["instruction_set"],
        "environment": settings,
    }


def print_rows(rows, *columns):
    """Prints these columns of some rows as a table."""
    lines = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line, widths))
        print("  ".join(cells), flush=True)


def write(path, rows, **others):
    """Writes the machine and what was measured as JSON, a line for each of the rows."""
    head = json.dumps({"machine": machine(), **others}, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"written to {path}")


def _processor():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
