"""Draws what the benchmarks have measured: one figure beside each of their JSON files.

    python scripts/benchmarks/plot_benchmarks.py  # all of scripts/results

It needs matplotlib, and no MXNet: it must not know how anything is measured.
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
}


def distinct(rows, key):
    return list(dict.fromkeys(row[key] for row in rows))


def bars(axis, rows, modes, key, series, value, form="{:.0f}"):
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
        axis.bar_label(drawn, labels, fontsize=7, padding=1)
    axis.set_xticks(range(len(modes)), modes)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def panels(rows, columns, width, height, **more):
    """A figure and its axes, of so many inches each."""
    size = (width * columns, height * rows)
    options = {"figsize": size, "squeeze": False, "layout": "constrained", **more}
    return pyplot.subplots(rows, columns, **options)


def finish(figure, axis, document, columns=4):
    """One legend for all panels, above them, where it covers no data."""
    machine = document["machine"]
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title=f"{machine['cores']} cores of {machine['processor']}, "
        f"MXNet {machine['mxnet']}, gluon_syncbn {machine['gluon_syncbn']}",
        loc="outside upper center",
        ncol=columns,
        fontsize=9,
        title_fontsize=9,
        frameon=False,
    )


def select(rows, **wanted):
    """The rows with these values."""
    return [row for row in rows if all(row[k] == v for k, v in wanted.items())]


def find(rows, **wanted):
    """The one row with these values, or None."""
    return next(iter(select(rows, **wanted)), None)


def draw_layer(document):
    rows = document["rows"]
    for row in rows:  # PyTorch has no modes
        row["mode"] = row["mode"].replace("eager", "static_shape")
    places, contexts = distinct(rows, "place"), distinct(rows, "contexts")
    figure, axes = panels(len(places), len(contexts), 6, 3.2)
    modes, layers = distinct(rows, "mode"), distinct(rows, "layer")
    for place, line in zip(places, axes):
        for count, axis in zip(contexts, line):
            here = select(rows, place=place, contexts=count)
            bars(axis, here, modes, "layer", layers, lambda row: row["median_ms"])
            axis.set_title(f"{place}, contexts: {count}", fontsize=10)
        line[0].set_ylabel("forward + backward, ms")
    finish(figure, axes[-1][0], document)
    return figure


def draw_sizes(document):
    rows, keys = document["rows"], ("size", "batch", "dtype", "channels", "contexts")
    cases, layers = distinct_parts(rows, *keys), distinct_parts(rows, "layer", "place")
    (axes,) = panels(1, 2, 6.5, 1.8 + 0.27 * len(cases), sharey=True)[1]
    figure = axes[0].figure
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
        axis.plot(copies, range(len(cases)), "k|", markersize=11, label="memory copy")
        axis.set_xlim(left=0)
        axis.set_xlabel(f"{direction}: least bytes over time, GB/s")
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    label = "{size}, batch {batch}, {dtype}, channels {channels}, contexts {contexts}"
    axes[0].set_yticks(range(len(cases)), [label.format(**case) for case in cases])
    axes[0].invert_yaxis()
    finish(figure, axes[0], document, columns=7)
    return figure


def distinct_parts(rows, *keys):
    """The different values of these keys, as dicts."""
    found = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    return [dict(zip(keys, values)) for values in found]


def draw_net(document):
    rows = document["rows"]
    nets, layers = distinct(rows, "net"), distinct(rows, "layer")
    figure, axes = panels(1, len(nets), 6, 3.8)
    for net, axis in zip(nets, axes[0]):
        here = select(rows, net=net)
        seconds = {"value": lambda row: 1e-3 * row["median_ms"], "form": "{:.2f}"}
        bars(axis, here, distinct(rows, "mode"), "layer", layers, **seconds)
        row = here[0]
        axis.set_title(
            f"{net}, crop {row['crop']}, {row['batch']} images on each of "
            f"{row['contexts']} contexts",
            fontsize=10,
        )
    axes[0][0].set_ylabel("training step, s")
    finish(figure, axes[0][0], document)
    return figure


def draw_memory(document):
    """Bars of activations, and curves of the first and last mode, at the last size."""
    last = document["rows"][-1]
    rows = select(document["rows"], crop=last["crop"], batch=last["batch"])
    arrangements, modes = distinct(rows, "arrangement"), distinct(rows, "mode")
    variants = distinct(rows, "variant")
    curves = list(dict.fromkeys([modes[0], modes[-1]]))
    figure, axes = panels(1 + len(curves), len(arrangements), 6, 3.5, sharey="row")
    for arrangement, (upper, *lower) in zip(arrangements, zip(*axes)):
        here = select(rows, arrangement=arrangement)
        activations = {"value": lambda row: row["mxnet"]["after_forward_mb"]}
        bars(upper, here, modes, "variant", variants, **activations)
        upper.set_title(
            f"ResNet-50, {arrangement}, batch {last['batch']}, crop {last['crop']}",
            fontsize=10,
        )
        for axis, mode in zip(lower, curves):
            draw_curves(axis, select(here, mode=mode))
    axes[0][0].set_ylabel("after forward, MXNet's figure, MB")
    for axis in axes[1:, 0]:
        axis.set_ylabel("above before the step, MB")
        axis.set_ylim(bottom=0)  # of the whole row, now that all is drawn
    finish(figure, axes[1][0], document, columns=3)
    return figure


def draw_curves(axis, rows):
    """Memory over forward and backward of each variant in one mode."""
    for row in rows:
        curve, variant = row["mxnet"]["curve_mb"], row["variant"]
        axis.plot(curve, color=COLOURS[variant], label=variant)
    half = len(curve) / 2
    axis.axvline(half, color="black", linewidth=0.5)
    axis.set_xticks([half / 2, 3 * half / 2], ["forward", "backward"])
    axis.set_xlabel(f"{rows[0]['mode']}: time, both halves scaled to the same width")
    axis.spines[["top", "right"]].set_visible(False)


def draw_exchange(document):
    """The model of a step's exchanges, for each net over the number of processes."""
    model = document["model"]
    nets = distinct(model, "net")
    figure, axes = pyplot.subplots(1, len(nets), figsize=(10, 4), sharey=True)
    for axis, net in zip(axes, nets):
        for link in distinct(model, "link"):
            points = select(model, net=net, link=link)
            ranks = [point["ranks"] for point in points]
            times = [point["milliseconds"] for point in points]
            axis.semilogx(ranks, times, "o-", base=2, label=link)
        axis.set(title=f"{net}, {len(NETS[net])} layers", xlabel="processes")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("exchanges of one step, ms (model)")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
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
    for name in found:
        document = json.loads((options.results / f"{name}.json").read_text())
        figure = FIGURES[name](document)
        path = options.results / f"{name}.png"
        figure.savefig(path, dpi=120)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
