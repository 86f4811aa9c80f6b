"""Functions of all benchmarks: time in turns, compute medians, write JSON, draw.

python scripts/benchmarks/benchmarking.py  # draws all JSON of scripts/results
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import gluon_syncbn

import mxnet as mx
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.helpers import MODES, set_mode  # noqa: E402, F401

RESULTS = Path(__file__).parents[1] / "results"
# name: (title of a panel, group of bars, bar), labels of heights
FIGURES = {
    "benchmark_layer": (
        ("{place}, contexts: {contexts}", "{mode}", "{layer}"),
        {"median_ms": "forward + backward, ms"},
    ),
    "benchmark_net": (
        ("{net}, crop {crop}, {contexts} contexts of {batch}", "{mode}", "{layer}"),
        {"median_ms": "training step, ms"},
    ),
    "benchmark_memory": (
        ("{arrangement}, batch {batch}, crop {crop}", "{mode}", "{variant}"),
        {"after_forward_mb": "kept after forward, MB", "peak_mb": "peak of a step, MB"},
    ),
}


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


def write(path, rows, *columns):
    """Print some columns of the rows, and write all columns and the machine as JSON."""
    for row in rows:
        print("  ".join(str(row[name]) for name in columns))
    head = json.dumps({"machine": machine()}, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"written to {path}")


def draw(document, texts, heights):
    """Return a figure with a row of bar charts for each kind of height."""
    from matplotlib import pyplot

    pyplot.style.use(Path(__file__).parents[1] / "figures.mplstyle")
    panels = {}
    for row in document["rows"]:
        title, group, bar = (text.format(**row) for text in texts)
        panels.setdefault(title, {}).setdefault(bar, {})[group] = row
    size = {"figsize": (4 * len(panels), 3.4 * len(heights)), "squeeze": False}
    figure, axes = pyplot.subplots(len(heights), len(panels), **size)
    for line, (key, label) in zip(axes, heights.items()):
        line[0].set_ylabel(label)
        for axis, (title, bars) in zip(line, panels.items()):
            axis.set_title(title)
            for k, (bar, rows) in enumerate(bars.items()):
                width, places = 0.8 / len(bars), np.arange(len(rows))
                values = [row[key] for row in rows.values()]
                drawn = axis.bar(places + k * width, values, width, label=bar)
                axis.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2, rotation=90)
                axis.set_xticks(places + 0.4, rows, fontsize=8)
            axis.margins(y=0.16)
    title = "{cores} cores of {processor}, MXNet {mxnet}, gluon_syncbn {gluon_syncbn}"
    handles, labels = axes[0][0].get_legend_handles_labels()
    options = {"title": title.format(**document["machine"]), "ncol": len(labels)}
    figure.legend(handles, labels, loc="outside upper center", **options)
    return figure


if __name__ == "__main__":
    for file in Path(*sys.argv[1:] or [RESULTS]).glob("benchmark_*.json"):
        if file.stem in FIGURES:
            figure = draw(json.loads(file.read_text()), *FIGURES[file.stem])
            figure.savefig(file.with_suffix(".png"), dpi=120)
            print(f"written to {file.with_suffix('.png')}")
