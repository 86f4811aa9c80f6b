"""Draws what the benchmarks have measured: two figures beside each of their JSON files.

    python scripts/benchmarks/plot_benchmarks.py  # all of scripts/results

In NAME_narrow.png, for narrow screens, the panels stand below each other. The script
needs matplotlib, and no MXNet: it must not know how anything is measured.
"""

import argparse
import json
import sys
from pathlib import Path

try:
    import matplotlib
except ImportError:
    sys.exit("plot_benchmarks.py needs matplotlib: pip install matplotlib")
matplotlib.use("Agg")
from exchange_model import NETS
from matplotlib import pyplot

COLOURS = {
    "gluon_syncbn": "tab:blue",
    "gluon_syncbn fused": "tab:red",
    "BatchNorm": "tab:gray",
    "contrib": "tab:orange",
    "PyTorch": "tab:green",
    "SyncBatchNorm": "tab:blue",
    "fused": "tab:red",
    "memory copy": "tab:gray",
}
STYLE = Path(__file__).parents[1] / "figures.mplstyle"


def distinct(rows, key):
    return list(dict.fromkeys(row[key] for row in rows))


def bars(axis, rows, modes, key, series, value, form="{:.0f}", **label):
    """For each mode a bar of each of a series, by this key of the rows."""
    width = 0.8 / len(series)
    for k, name in enumerate(series):
        shift = (k - (len(series) - 1) / 2) * width
        found = [find(rows, mode=mode, **{key: name}) for mode in modes]
        places = [place for place, row in enumerate(found) if row]
        heights = [value(found[place]) for place in places]
        positions = [place + shift for place in places]
        drawn = axis.bar(positions, heights, width, label=name, color=COLOURS[name])
        labels = [form.format(height) for height in heights]
        axis.bar_label(drawn, labels, fontsize=7, padding=1, **label)
    axis.set_xticks(range(len(modes)), modes, fontsize=8)
    axis.margins(y=0.12)


def side_by_side(rows, columns, height, sharey="none"):
    """A figure of 12 inches and its axes in a grid, of so many inches each."""
    size = 12, height * rows
    return pyplot.subplots(rows, columns, figsize=size, sharey=sharey, squeeze=False)


def stacked(rows, columns, height, sharey="none"):
    """The same axes below each other in a figure of 4 inches, a scale for each."""
    size = 4, height * rows * columns
    figure, axes = pyplot.subplots(rows * columns, figsize=size, squeeze=False)
    return figure, axes.reshape(rows, columns)


def finish(figure, axis, document):
    """One legend for all panels, above them, where it covers no data."""
    machine = document["machine"]
    handles, labels = axis.get_legend_handles_labels()
    width = 0.5 + 0.07 * max(map(len, labels))  # inches of an entry
    figure.legend(
        handles,
        labels,
        title=f"{machine['cores']} cores of {machine['processor']}, "
        f"MXNet {machine['mxnet']}, gluon_syncbn {machine['gluon_syncbn']}",
        loc="outside upper center",
        ncol=min(len(labels), int(figure.get_figwidth() / width)),
        fontsize=9,
        title_fontsize=9,
    )


def select(rows, **wanted):
    """The rows with these values."""
    return [row for row in rows if all(row[k] == v for k, v in wanted.items())]


def find(rows, **wanted):
    """The one row with these values, or None."""
    return next(iter(select(rows, **wanted)), None)


def draw_layer(document, panels):
    rows = document["rows"]
    for row in rows:  # PyTorch has no modes
        row["mode"] = row["mode"].replace("eager", "static_shape")
    places, contexts = distinct(rows, "place"), distinct(rows, "contexts")
    figure, axes = panels(len(places), len(contexts), 3.2)
    modes, layers = distinct(rows, "mode"), distinct(rows, "layer")
    for place, line in zip(places, axes):
        for count, axis in zip(contexts, line):
            here = select(rows, place=place, contexts=count)
            bars(axis, here, modes, "layer", layers, lambda row: row["median_ms"])
            axis.set_title(f"{place}, contexts: {count}")
        line[0].set_ylabel("forward + backward, ms")
    finish(figure, axes[-1][0], document)
    return figure


def draw_sizes(document, panels):
    rows, keys = document["rows"], ("size", "batch", "dtype", "channels", "contexts")
    cases, layers = distinct_parts(rows, *keys), distinct_parts(rows, "layer", "place")
    labels = [label_of(case) for case in cases]
    figure, (axes,) = panels(1, 2, 1.8 + 0.27 * len(cases), sharey="row")
    for axis, direction in zip(axes, ("forward", "backward")):
        for layer in layers:
            found = [find(rows, direction=direction, **layer, **case) for case in cases]
            points = [(row["gb_s"], place) for place, row in enumerate(found) if row]
            axis.plot(
                *zip(*points),
                "o",
                color=COLOURS[layer["layer"]],
                markerfacecolor="none" if layer["place"] == "inside" else None,
                label="{layer}, {place}".format(**layer),
            )
        copies = [find(rows, **case)["copy_gb_s"] for case in cases]
        style = {"color": COLOURS["memory copy"], "markersize": 11}
        axis.plot(copies, range(len(cases)), "|", **style, label="memory copy")
        axis.set_xlim(left=0)
        axis.set_xlabel(f"{direction}, least bytes: GB/s")
        axis.grid(axis="y")
        axis.set_yticks(range(len(cases)), labels, fontsize=7)
        axis.set_ylim(len(cases) - 0.5, -0.5)
    finish(figure, axes[0], document)
    return figure


def label_of(case):
    layout = {"first": "NCHW", "last": "NHWC"}[case["channels"]]
    return "{size}, batch {batch},\n{dtype}, {}, contexts {contexts}".format(
        layout, **case
    )


def distinct_parts(rows, *keys):
    """The different values of these keys, as dicts."""
    found = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    return [dict(zip(keys, values)) for values in found]


def draw_net(document, panels):
    rows = document["rows"]
    nets, layers = distinct(rows, "net"), distinct(rows, "layer")
    figure, axes = panels(1, len(nets), 3.8)
    for net, axis in zip(nets, axes[0]):
        here = select(rows, net=net)
        seconds = {"value": lambda row: 1e-3 * row["median_ms"], "form": "{:.2f}"}
        modes = distinct(rows, "mode")
        bars(axis, here, modes, "layer", layers, **seconds, rotation=90)
        row = here[0]
        axis.set_title(
            f"{net}, crop {row['crop']}, {row['contexts']} contexts "
            f"of {row['batch']} images"
        )
    axes[0][0].set_ylabel("training step, s")
    finish(figure, axes[0][0], document)
    return figure


def draw_memory(document, panels):
    """Bars of activations, and curves of the first and last mode, at the last size."""
    last = document["rows"][-1]
    rows = select(document["rows"], crop=last["crop"], batch=last["batch"])
    arrangements, modes = distinct(rows, "arrangement"), distinct(rows, "mode")
    variants = distinct(rows, "variant")
    curves = list(dict.fromkeys([modes[0], modes[-1]]))
    figure, axes = panels(1 + len(curves), len(arrangements), 3.5, sharey="row")
    for arrangement, (upper, *lower) in zip(arrangements, zip(*axes)):
        here = select(rows, arrangement=arrangement)
        activations = {"value": lambda row: row["mxnet"]["after_forward_mb"]}
        bars(upper, here, modes, "variant", variants, **activations)
        upper.set_title(
            f"ResNet-50, {arrangement}, batch {last['batch']}, crop {last['crop']}"
        )
        for axis, mode in zip(lower, curves):
            draw_curves(axis, select(here, mode=mode))
    axes[0][0].set_ylabel("after forward, MXNet's figure, MB")
    for axis in axes[1:, 0]:
        axis.set_ylabel("above before the step, MB")
    for axis in axes[1:].flat:
        axis.set_ylim(bottom=0)  # now that all is drawn
    finish(figure, axes[1][0], document)
    return figure


def draw_curves(axis, rows):
    """Memory over forward and backward of each variant in one mode."""
    for row in rows:
        curve, variant = row["mxnet"]["curve_mb"], row["variant"]
        axis.plot(curve, color=COLOURS[variant], label=variant)
    half = len(curve) / 2
    axis.axvline(half, color="tab:gray", linewidth=0.5)
    axis.set_xticks([half / 2, 3 * half / 2], ["forward", "backward"])
    axis.set_xlabel(
        f"{rows[0]['arrangement']}, {rows[0]['mode']}:\n"
        "time, both halves scaled to the same width"
    )


def draw_exchange(document, panels):
    """The model of a step's exchanges, for each net over the number of processes."""
    model = document["model"]
    nets = distinct(model, "net")
    figure, (axes,) = panels(1, len(nets), 4, sharey="row")
    for axis, net in zip(axes, nets):
        for link in distinct(model, "link"):
            points = select(model, net=net, link=link)
            ranks = [point["ranks"] for point in points]
            times = [point["milliseconds"] for point in points]
            axis.semilogx(ranks, times, "o-", base=2, label=link)
        axis.set(title=f"{net}, {len(NETS[net])} layers", xlabel="processes")
        axis.grid()
    for axis in axes:
        axis.set_ylabel("exchanges of one step, ms (model)")
        axis.set_ylim(bottom=0)  # now that all is drawn
    finish(figure, axes[0], document)
    return figure


FIGURES = {
    "benchmark_layer": draw_layer,
    "benchmark_sizes": draw_sizes,
    "benchmark_net": draw_net,
    "benchmark_memory": draw_memory,
    "benchmark_exchange": draw_exchange,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    results = Path(__file__).parents[1] / "results"
    parser.add_argument("--results", type=Path, default=results, help="the folder")
    options = parser.parse_args()
    found = [n for n in FIGURES if (options.results / f"{n}.json").exists()]
    if not found:
        names = ", ".join(f"{name}.json" for name in FIGURES)
        sys.exit(f"{options.results} has none of {names}: run a benchmark first")
    pyplot.style.use(STYLE)
    for name in found:
        document = json.loads((options.results / f"{name}.json").read_text())
        for panels, ending, dpi in ((side_by_side, "", 120), (stacked, "_narrow", 180)):
            path = options.results / f"{name}{ending}.png"
            FIGURES[name](document, panels).savefig(path, dpi=dpi)
            print(f"written to {path}")


if __name__ == "__main__":
    main()
