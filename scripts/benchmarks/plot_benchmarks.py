"""Draws what the benchmarks have measured: a figure beside each of their JSON files.

    python scripts/benchmarks/plot_benchmarks.py  # all of scripts/results

It must not know how anything is measured.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot

matplotlib.use("Agg")
COLOURS = {
    "gluon_syncbn": "tab:blue",
    "BatchNorm": "tab:gray",
    "contrib": "tab:orange",
    "SyncBatchNorm": "tab:blue",
    "activation built in": "tab:red",
}
STYLE = Path(__file__).parents[1] / "figures.mplstyle"


@dataclass
class Figure:
    """Panels of bars. Their texts are formatted with rows of the results."""

    title: str  # of a panel; as many columns as there are different ones
    group: str  # of bars
    bar: str  # of a group
    lines: list  # for each line of panels: what its rows have, the figure, its label


FIGURES = {
    "benchmark_layer": Figure(
        *("{place}, contexts: {contexts}", "{mode}", "{layer}"),
        lines=[
            ({"place": place}, "median_ms", "forward + backward, ms")
            for place in ("inside", "convolutions", "alone")
        ],
    ),
    "benchmark_net": Figure(
        "{net}, crop {crop}, {contexts} contexts of {batch} images",
        *("{mode}", "{layer}"),
        lines=[({}, "median_ms", "training step, ms")],
    ),
    "benchmark_memory": Figure(
        "ResNet-50, {arrangement}, batch {batch}, crop {crop}",
        *("{mode}", "{variant}"),
        lines=[
            ({}, "after_forward_mb", "kept after forward, MB"),
            ({}, "peak_mb", "peak of the step, MB"),
        ],
    ),
    "benchmark_exchange": Figure(
        *("sum of float64, {kind}", "processes: {processes}", "{kilobytes} KB"),
        lines=[({}, "median_ms", "median, ms")],
    ),
}


def grouped(rows, text):
    """The rows by this text, formatted with each."""
    found = {}
    for row in rows:
        found.setdefault(text.format(**row), []).append(row)
    return found


def draw_bars(axis, rows, about, key):
    """A bar of each row, in groups by one text and in a colour by another."""
    places, series = list(grouped(rows, about.group)), grouped(rows, about.bar)
    width = 0.8 / len(series)
    for k, (name, chosen) in enumerate(series.items()):
        shift = (k - (len(series) - 1) / 2) * width
        heights = [row[key] for row in chosen]
        positions = [places.index(about.group.format(**r)) + shift for r in chosen]
        style = {"label": name, "color": COLOURS.get(name)}
        drawn = axis.bar(positions, heights, width, **style)
        texts = [f"{h:.0f}" if h >= 10 else f"{h:.2g}" for h in heights]
        axis.bar_label(drawn, texts, fontsize=7, padding=2, rotation=90)
    axis.set_xticks(range(len(places)), places, fontsize=8)
    axis.margins(y=0.16)


def draw(document, about):
    """The figure, with one legend above all panels, where it covers no data."""
    machine, lines = document["machine"], []
    for wanted, *value in about.lines:
        rows = [row for row in document["rows"] if wanted.items() <= row.items()]
        lines.append((grouped(rows, about.title), *value))
    shape = len(lines), max(len(panels) for panels, *_ in lines)
    size = {"figsize": (12, 3.4 * len(lines)), "squeeze": False}
    figure, axes = pyplot.subplots(*shape, **size)
    for line, (panels, key, label) in zip(axes, lines):
        line[0].set_ylabel(label)
        for axis, (title, rows) in zip(line, panels.items()):
            draw_bars(axis, rows, about, key)
            axis.set_title(title)
    handles, labels = axes[0][0].get_legend_handles_labels()
    title = (
        f"{machine['cores']} cores of {machine['processor']}, "
        f"MXNet {machine['mxnet']}, gluon_syncbn {machine['gluon_syncbn']}"
    )
    options = {"title": title, "fontsize": 9, "title_fontsize": 9, "ncol": len(labels)}
    figure.legend(handles, labels, loc="outside upper center", **options)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    results = Path(__file__).parents[1] / "results"
    parser.add_argument("--results", type=Path, default=results, help="the folder")
    folder = parser.parse_args().results
    found = [name for name in FIGURES if (folder / f"{name}.json").exists()]
    if not found:
        names = ", ".join(f"{name}.json" for name in FIGURES)
        sys.exit(f"{folder} has none of {names}: run a benchmark first")
    pyplot.style.use(STYLE)
    for name in found:
        document = json.loads((folder / f"{name}.json").read_text())
        path = folder / f"{name}.png"
        draw(document, FIGURES[name]).savefig(path, dpi=120)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
