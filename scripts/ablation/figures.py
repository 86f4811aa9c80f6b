"""Draws the figures of an experiment from its results, and from nothing else.

Called by ablation.py. `ablation.png` shows the gain: scores, curves and predictions;
`ablation_details.png`, in details.py, its reasons and its classes. In NAME_narrow.png,
for narrow screens, the panels stand below each other.
"""

import base64
import io
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from matplotlib.lines import Line2D
from PIL import Image
from segmentation.files import replacing
from segmentation.report import painted

from . import details
from .details import NORMS, ONE_DEVICE, RECOMPUTED, finish, panels
from .results import has, runs, score

STYLE = Path(__file__).parents[1] / "figures.mplstyle"


def draw(found, folder):
    """Draw what the results are enough for; return the paths."""
    paths, drawn = [], {"ablation_details": details.draw}
    if runs(found, model="fastscnn"):
        drawn["ablation"] = gain
    for name, function in drawn.items():
        for narrow, ending, dpi in ((False, "", 120), (True, "_narrow", 180)):
            paths.append(folder / f"{name}{ending}.png")
            with pyplot.style.context(STYLE):
                figure = function(found, narrow)
                with replacing(paths[-1]) as file:
                    figure.savefig(file, format="png", dpi=dpi)
            pyplot.close(figure)
    return paths


def gain(found, narrow):
    """mIoU over images per device; curves of the one-image case; a few images."""
    fast = runs(found, model="fastscnn")
    counts = sorted({run["devices"] for run in fast if run["devices"] > 1})
    if narrow:
        figure = pyplot.figure(figsize=(4, 18))
        upper, lower, strip = figure.subfigures(3, height_ratios=[len(counts), 2, 1.5])
    else:
        figure = pyplot.figure(figsize=(13, 7.6))
        left, strip = figure.subfigures(1, 2, width_ratios=[1.25, 1])
        upper, lower = left.subfigures(2)
    axes = panels(upper, len(counts), narrow, sharey=True)
    for axis, count in zip(axes, counts):
        draw_scores(axis, found, count)
    axes[0].set_ylabel("mIoU on the test split")
    one_image = runs(found, model="fastscnn", devices=min(counts), images=1)
    mean_iou, val_loss = panels(lower, 2, narrow)
    draw_curves(mean_iou, one_image, "mean_iou", "mIoU")
    mean_iou.set_ylim(bottom=0)
    draw_curves(val_loss, one_image, "val_loss", "loss per pixel")
    val_loss.set_yscale("log")
    draw_strip(strip, fast, one_image)
    about = fast[0]
    title = (
        f"FastSCNN on {next(iter(found)).split('-')[0]}, crop "
        f"{about['settings']['crop_size']}; {about['train_images']} images for "
        f"training, {about['test_images']} for testing; epochs: "
        f"{about['settings']['epochs']}, seeds: {len({run['seed'] for run in fast})}"
    )
    figure.suptitle(title.replace("; ", "\n") if narrow else title, fontsize=11)
    styles = [(*style, "-") for style in NORMS.values()] + [(*ONE_DEVICE, "")]
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle=line, label=label)
        for label, colour, marker, line in styles
    ]
    if any("recomputed" in run.get("test", ()) for run in fast):
        style = {**RECOMPUTED, "color": "tab:gray", "marker": "o"}
        handles.append(Line2D([], [], label="statistics recomputed", **style))
    place = {"loc": "outside lower center", "ncol": 1 if narrow else 4}
    figure.legend(handles=handles, fontsize=10, **place)
    return figure


def draw_scores(axis, found, devices):
    """A point for each seed, a line through the means; one device as dashes."""
    case = {"model": "fastscnn", "devices": devices}
    images = sorted({run["images"] for run in runs(found, **case)})
    for shift, (norm, (_, colour, marker)) in zip((-0.07, 0.07), NORMS.items()):
        for kind, style in (("running", {}), ("recomputed", RECOMPUTED)):
            means = []
            for place, count in enumerate(images):
                arm = runs(found, **case, norm=norm, images=count)
                group = [score(run, kind) for run in arm if has(run, kind)]
                x = place + shift
                points = {**style, "linestyle": "", "alpha": 0.55}
                axis.plot([x] * len(group), group, marker, color=colour, **points)
                means.append((x, np.mean(group) if group else np.nan))
            axis.plot(*zip(*means), color=colour, **style)
    for place, count in enumerate(images):
        whole = {"devices": 1, "images": devices * count}
        alone = [score(run) for run in runs(found, model="fastscnn", **whole)]
        x = [place + 0.21] * len(alone)
        _, colour, marker = ONE_DEVICE
        axis.plot(x, alone, marker, color=colour, markersize=11)
    axis.set_xticks(range(len(images)), images)
    axis.set_xlim(-0.4, len(images) - 0.6)
    axis.set_ylim(bottom=0)
    finish(axis, f"{devices} devices", "images per device")


def draw_curves(axis, one_image, key, label):
    """Validation over the epochs of the runs with one image per device."""
    for run in one_image:
        _, colour, marker = NORMS[run["norm"]]
        epochs = [entry["epoch"] for entry in run.get("epochs", [])]
        values = [entry[key] for entry in run.get("epochs", [])]
        values = [np.nan if value is None else value for value in values]
        style = {"alpha": 0.8, "linewidth": 1.3, "marker": marker, "markersize": 3}
        axis.plot(epochs, values, color=colour, **style)
    devices = one_image[0]["devices"] if one_image else 0
    axis.set_ylabel(label)
    axis.xaxis.get_major_locator().set_params(integer=True)
    finish(axis, f"{devices} devices, 1 image each: validation", "epoch")


def draw_strip(figure, fast, one_image):
    """Test images, truth, and what both norms predict with one image per device."""
    first = [run for run in one_image if run["seed"] == 0 and "predictions" in run]
    by_norm = {run["norm"]: run for run in first}
    source = next((run for run in fast if "images_shown" in run), None)
    if source is None or len(by_norm) < 2:
        return

    def labels(texts):
        count = len(source["classes"])
        maps = [picture(text).astype(int) for text in texts]
        return [painted(np.where(m < count, m, -1), count) for m in maps]

    columns = {
        "image": [picture(text) for text in source["images_shown"]],
        "truth": labels(source["truths_shown"]),
    }
    for norm, (label, _, _) in NORMS.items():
        columns[label.split(",")[0]] = labels(by_norm[norm]["predictions"])
    axes = figure.subplots(len(columns["image"]), len(columns), squeeze=False)
    for column, (name, pictures) in zip(axes.T, columns.items()):
        column[0].set_title(name, fontsize=8)
        for axis, one in zip(column, pictures):
            axis.imshow(one, interpolation="nearest")
            axis.set_axis_off()


def picture(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
