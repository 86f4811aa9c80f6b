"""Draws the second figure: reasons, classes, and agreement with one device.

Called by figures.py, which takes the styles from here. It must not know how results are
written.
"""

import numpy as np
from matplotlib import pyplot

from .results import has, runs, score

# The name in the results: label, colour, marker.
NORMS = {
    "bn": ("nn.BatchNorm, each device alone", "tab:gray", "s"),
    "syncbn": ("SyncBatchNorm", "tab:blue", "o"),
}
ONE_DEVICE = "one device, whole batch", "tab:orange", "_"
RECOMPUTED = {"linestyle": ":", "markerfacecolor": "none"}


def panels(figure, count, narrow, **options):
    """Axes beside each other, or below each other on narrow screens."""
    shape = (count, 1) if narrow else (1, count)
    return figure.subplots(*shape, squeeze=False, **options).ravel()


def finish(axis, title, xlabel=""):
    axis.set_title(title)
    axis.set_xlabel(xlabel)
    axis.grid()


def draw(found, narrow):
    figure = pyplot.figure(figsize=(4, 17) if narrow else (13, 8.4))
    upper, lower = (panels(half, 3, narrow) for half in figure.subfigures(2))
    draw_gap(upper[0], found)
    draw_classes(upper[1], found)
    draw_other_net(upper[2], found)
    for label, colour, marker in (*NORMS.values(), ONE_DEVICE):
        lower[2].plot([], [], marker, color=colour, label=label)
    lower[2].legend(loc="center", fontsize=10)
    lower[2].set_axis_off()
    agreement = [r for r in found.values() if r["kind"] == "agreement"]
    rows = [row for result in agreement for row in result["rows"]]
    draw_differences(lower[0], [row for row in rows if "differences" in row])
    draw_losses(lower[1], [row for row in rows if row["dtype"] == "float32"])
    for axis in (*upper, *lower[:2]):
        if not axis.has_data():
            axis.set_axis_off()  # this part of the experiment was not made
    return figure


def draw_gap(axis, found):
    """mIoU with running statistics, and with those of the batch, of every arm."""
    fast = [r for r in runs(found, model="fastscnn") if r["devices"] > 1]
    arms = sorted({(r["devices"], r["images"]) for r in fast})
    for shift, (norm, (_, colour, marker)) in zip((-0.12, 0.12), NORMS.items()):
        for run in (run for run in fast if run["norm"] == norm):
            x = [arms.index((run["devices"], run["images"])) + shift] * 2
            both = [score(run, kind) for kind in ("running", "batch")]
            axis.plot(x, both, color=colour, alpha=0.5, linewidth=1)
            axis.plot(x[0], both[0], marker, color=colour)
            axis.plot(x[1], both[1], marker, color=colour, markerfacecolor="none")
    axis.set_xticks(range(len(arms)), [f"{d} x {i}" for d, i in arms])
    axis.set_xlim(-0.5, len(arms) - 0.5)
    axis.set_ylim(bottom=0)
    title = "mIoU with running (filled) and batch statistics"
    finish(axis, title, "devices x images each")


def draw_classes(axis, found):
    """IoU of each class with one image per device, the mean over the seeds."""
    fast = [r for r in runs(found, model="fastscnn", images=1) if r["devices"] > 1]
    devices = min((run["devices"] for run in fast), default=0)
    for shift, (norm, (_, colour, _)) in zip((0.2, -0.2), NORMS.items()):
        arm = [r for r in fast if (r["devices"], r["norm"]) == (devices, norm)]
        arm = [run for run in arm if "test" in run]
        if arm:
            names = [name.split(",")[0] for name in arm[0]["classes"]]
            values = [run["test"]["running"]["class_iou"] for run in arm]
            values = np.mean(np.array(values, float), axis=0)
            axis.barh(np.arange(len(names)) + shift, values, 0.4, color=colour)
            axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    finish(axis, f"IoU by class, {devices} devices, 1 image each")


def draw_other_net(axis, found):
    """Every arm of the reduced grid, a point for each seed."""
    fcn = runs(found, model="fcn")
    if not fcn:
        return
    arms = {(r["norm"], r["devices"], r["images"]) for r in fcn}
    arms = sorted(arms, key=lambda arm: (arm[1] == 1, arm))
    for place, (norm, devices, images) in enumerate(arms):
        _, colour, marker = ONE_DEVICE if devices == 1 else NORMS[norm]
        case = {"model": "fcn", "norm": norm, "devices": devices, "images": images}
        group = runs(found, **case)
        values = [score(run) for run in group]
        axis.plot([place] * len(values), values, marker, color=colour, markersize=8)
        axis.axhline(np.mean(values), color=colour, alpha=0.25)
        values = [score(run, "recomputed") for run in group if has(run, "recomputed")]
        style = {**RECOMPUTED, "linestyle": "", "color": colour, "markersize": 8}
        axis.plot([place + 0.2] * len(values), values, marker, **style)
    labels = [f"{norm}\n{devices} x {images}" for norm, devices, images in arms]
    axis.set_xticks(range(len(arms)), labels, fontsize=8)
    axis.margins(x=0.3, y=0.15)
    axis.set_ylim(bottom=0)
    crop = fcn[0]["settings"]["crop_size"]
    finish(axis, f"FCN-ResNet-50, crop {crop}: mIoU, recomputed (open)")


def style_of(row):
    """Dotted for the net that was moved; a colour for each number of devices."""
    devices, noise = row["devices"], row["noise"]
    colour = {1: ONE_DEVICE[1], 2: "tab:blue"}.get(devices, "tab:green")
    if noise:
        label = f"1 device, {noise:g} of noise"
        return {"color": colour, "linestyle": ":", "label": label}
    if devices == 1:
        return {"color": colour, "linewidth": 2, "label": "1 device"}
    return {"color": colour, "label": f"{devices} devices"}


def draw_differences(axis, rows):
    """The differences between losses and those of one device, step by step."""
    if not rows:
        return
    for row in rows:
        values = np.maximum(np.array(row["differences"], float), 1e-17)
        alpha = 1 if row["dtype"] == "float64" else 0.5
        style = {**style_of(row), "alpha": alpha}
        style["label"] = f"{row['dtype']}, {style['label']}"
        axis.plot(np.arange(1, len(values) + 1), values, **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.legend(fontsize=7, loc="lower right")
    finish(axis, "loss, relative to one device, same batches", "step")


def draw_losses(axis, rows):
    """The losses themselves in float32, averaged over neighbouring steps."""
    if not rows:
        return
    for row in rows:
        width = max(1, len(row["losses"]) // 20)
        values = np.convolve(row["losses"], np.ones(width) / width, "valid")
        axis.plot(values, **style_of(row))
    axis.legend(fontsize=7)
    finish(axis, "training loss, float32", "step")
