"""Draws the second figure: reasons, classes, agreement with one device, and cost.

Called by figures.py. It must not know how results are written.
"""

import numpy as np
from matplotlib import pyplot

from .results import runs, score
from .styles import NORMS, ONE_DEVICE, STYLES, finish, of_arm


def draw(found):
    figure = pyplot.figure(figsize=(15, 8.4), layout="constrained")
    upper, lower = figure.subplots(2, 4, width_ratios=[1.3, 1, 1, 1])
    fast = runs(found, model="fastscnn")
    draw_gap(upper[0], fast)
    draw_classes(upper[1], fast)
    draw_other_net(upper[2], runs(found, model="fcn"))
    draw_legend(upper[3])
    agreement = [r for r in found.values() if r["kind"] == "agreement"]
    cost = [r for r in found.values() if r["kind"] == "cost"]
    draw_differences(lower[0], agreement)
    draw_losses(lower[1], agreement)
    draw_bars(lower[2], cost, "median_ms", "training step (ms)")
    draw_bars(lower[3], cost, "peak_mb", "peak memory of the process (MB)")
    for axis in (*upper, *lower):
        if not axis.has_data() and axis is not upper[3]:
            axis.set_axis_off()  # this part of the experiment was not made
    return figure


def draw_gap(axis, fast):
    """mIoU with running statistics, and with those of the batch, of every arm."""
    arms = sorted({(r["devices"], r["images"]) for r in fast if r["devices"] > 1})
    for shift, (norm, (_, colour, marker)) in zip((-0.12, 0.12), NORMS.items()):
        for place, arm in enumerate(arms):
            for run in of_arm(fast, norm, *arm):
                both = [score(run, kind) for kind in ("running", "batch")]
                x = [place + shift] * 2
                axis.plot(x, both, color=colour, alpha=0.5, linewidth=1)
                axis.plot(x[0], both[0], marker, color=colour)
                axis.plot(x[1], both[1], marker, color=colour, markerfacecolor="white")
    axis.set_xticks(range(len(arms)), [f"{d} x {i}" for d, i in arms])
    axis.set_xlim(-0.5, len(arms) - 0.5)
    axis.set_xlabel("devices x images each")
    axis.set_ylim(bottom=0)
    axis.set_title("mIoU with running (filled) and batch statistics", fontsize=10)
    finish(axis)


def draw_classes(axis, fast):
    """IoU of each class with one image per device, the mean over the seeds."""
    devices = min((r["devices"] for r in fast if r["devices"] > 1), default=0)
    for shift, (norm, (_, colour, _)) in zip((0.2, -0.2), NORMS.items()):
        group = [r for r in of_arm(fast, norm, devices, 1) if "test" in r]
        if not group:
            continue
        names = [name.split(",")[0] for name in group[0]["classes"]]
        values = [r["test"]["running"]["class_iou"] for r in group]
        values = np.mean(np.array(values, float), axis=0)
        axis.barh(np.arange(len(names)) + shift, values, 0.4, color=colour)
        axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"IoU by class, {devices} devices, 1 image each", fontsize=10)
    finish(axis)


def draw_other_net(axis, found):
    """Every arm of the reduced grid, a point for each seed."""
    arms = {(r["norm"], r["devices"], r["images"]) for r in found}
    arms = sorted(arms, key=lambda arm: (arm[1] == 1, arm))
    for place, arm in enumerate(arms):
        _, colour, marker = ONE_DEVICE if arm[1] == 1 else NORMS[arm[0]]
        values = [score(run) for run in of_arm(found, *arm)]
        axis.plot([place] * len(values), values, marker, color=colour, markersize=8)
        axis.axhline(np.mean(values), color=colour, alpha=0.25)
    axis.set_xticks(
        range(len(arms)), [f"{n}\n{d} x {i}" for n, d, i in arms], fontsize=8
    )
    axis.margins(x=0.3, y=0.15)
    axis.set_ylim(bottom=0)
    if found:
        crop = found[0]["settings"]["crop_size"]
        axis.set_title(f"FCN-ResNet-50, crop {crop}: test mIoU", fontsize=10)
    finish(axis)


def draw_legend(axis):
    for label, colour, marker in (*STYLES.values(), ONE_DEVICE):
        axis.plot([], [], marker=marker, color=colour, label=label, linestyle="")
    axis.legend(loc="center", frameon=False, fontsize=10)
    axis.set_axis_off()


def described(row):
    if row["noise"]:
        return f"{row['dtype']}, 1 device, {row['noise']:g} of noise"
    return f"{row['dtype']}, {row['devices']} device{'s' * (row['devices'] > 1)}"


def draw_differences(axis, agreement):
    """The differences between losses and those of one device, step by step."""
    rows = [row for result in agreement for row in result["rows"]]
    for row in rows:
        if "differences" not in row:
            continue
        style = {"linestyle": ":" if row["noise"] else "-"}
        style["color"] = "black" if row["noise"] else f"C{row['devices'] // 2 - 1}"
        style["alpha"] = 1 if row["dtype"] == "float64" else 0.5
        values = np.maximum(np.array(row["differences"], float), 1e-17)
        steps = np.arange(1, len(values) + 1)
        axis.plot(steps, values, label=described(row), **style)
    if not rows:
        return
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_title("loss, relative to one device, same batches", fontsize=10)
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    finish(axis)


def draw_losses(axis, agreement):
    """The losses themselves in float32, averaged over neighbouring steps."""
    rows = [row for r in agreement for row in r["rows"] if row["dtype"] == "float32"]
    for row in rows:
        width = max(1, len(row["losses"]) // 20)
        values = np.convolve(row["losses"], np.ones(width) / width, "valid")
        style = {"color": "black" if row["noise"] else f"C{row['devices'] // 2 - 1}"}
        if row["devices"] == 1 and not row["noise"]:
            style = {"color": "black", "linewidth": 2}
        linestyle = ":" if row["noise"] else "-"
        label = described(row).split(", ", 1)[1]
        axis.plot(values, label=label, linestyle=linestyle, **style)
    if not rows:
        return
    axis.set_xlabel("step")
    axis.set_title("training loss, float32", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    finish(axis)


def draw_bars(axis, cost, key, label):
    """Each layer relative to nn.BatchNorm, the figure itself above; every case."""
    cases = {}
    for result in cost:
        for row in result["rows"]:
            case = f"{result['model']}\n{row['devices']} x {row['images']}"
            cases.setdefault(case, {})[row["layer"]] = row.get(key)
    for shift, layer in zip((-0.27, 0, 0.27), STYLES):
        for place, values in enumerate(cases.values()):
            value, base = values[layer], values["bn"]
            height = value / base if value else 0
            text = f"{value:.0f}" if value else " does not run"
            axis.bar(place + shift, height, 0.27, color=STYLES[layer][1])
            style = {"ha": "center", "va": "bottom", "fontsize": 6}
            rotation = 0 if value else 90
            axis.text(place + shift, height, text, rotation=rotation, **style)
    if not cases:
        return
    axis.set_xticks(range(len(cases)), cases, fontsize=8)
    axis.set_ylabel("relative to nn.BatchNorm")
    axis.set_title(label, fontsize=10)
    axis.margins(y=0.12)
    finish(axis)
