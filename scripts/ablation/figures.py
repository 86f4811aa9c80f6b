"""Draws the figures of an experiment from its results, and from nothing else.

Called by ablation.py. `ablation.png` shows the gain; `ablation_details.png` its
reasons, its classes and its cost.
"""

import base64
import io

import numpy as np
from matplotlib import pyplot
from matplotlib.lines import Line2D
from PIL import Image
from segmentation.files import write_atomically
from segmentation.report import painted

from . import details
from .results import runs, score
from .styles import NORMS, ONE_DEVICE, finish, of_arm


def draw(found, folder):
    """Draw what the results are enough for; return the paths."""
    paths, drawn = [], {"ablation_details.png": details.draw(found)}
    if runs(found, model="fastscnn"):
        drawn["ablation.png"] = gain(found)
    for name, figure in drawn.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, facecolor="white")
        pyplot.close(figure)
        write_atomically(folder / name, buffer.getbuffer())
        paths.append(folder / name)
    return paths


def gain(found):
    """mIoU over images per device; curves of the one-image case; a few images."""
    fast = runs(found, model="fastscnn")
    counts = sorted({run["devices"] for run in fast if run["devices"] > 1})
    figure = pyplot.figure(figsize=(13, 7.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.25, 1])
    upper, lower = left.subfigures(2, 1)
    axes = upper.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axis, count in zip(axes, counts):
        draw_scores(axis, fast, count)
    axes[0].set_ylabel("mIoU on the test split")
    draw_curves(lower.subplots(1, 2), fast, min(counts))
    draw_strip(right, fast, min(counts))
    figure.suptitle(title(found, fast), fontsize=11)
    figure.legend(
        handles=legend(), loc="outside lower center", ncol=3, frameon=False, fontsize=10
    )
    return figure


def title(found, fast):
    settings = fast[0]["settings"]
    name = next(iter(found)).split("-")[0]
    seeds = len({run["seed"] for run in fast})
    return (
        f"FastSCNN on {name}, crop {settings['crop_size']}; {fast[0]['train_images']} "
        f"images for training, {fast[0]['test_images']} for testing; "
        f"epochs: {settings['epochs']}, seeds: {seeds}"
    )


def legend():
    styles = [(*style, "-") for style in NORMS.values()] + [(*ONE_DEVICE, "")]
    return [
        Line2D([], [], color=colour, marker=marker, linestyle=line, label=label)
        for label, colour, marker, line in styles
    ]


def draw_scores(axis, fast, devices):
    """A point for each seed, a line through the means; one device as dashes."""
    images = sorted({run["images"] for run in fast if run["devices"] == devices})
    places = {count: place for place, count in enumerate(images)}
    for shift, (norm, (_, colour, marker)) in zip((-0.07, 0.07), NORMS.items()):
        means = []
        for count in images:
            group = [score(run) for run in of_arm(fast, norm, devices, count)]
            x = places[count] + shift
            axis.plot([x] * len(group), group, marker, color=colour, alpha=0.55)
            means.append((x, np.mean(group) if group else np.nan))
        axis.plot(*zip(*means), color=colour)
    for count in images:
        alone = [score(run) for run in of_arm(fast, "syncbn", 1, devices * count)]
        x = places[count] + 0.21
        axis.plot([x] * len(alone), alone, "_", color="black", markersize=11)
    axis.set_xticks(range(len(images)), images)
    axis.set_xlim(-0.4, len(images) - 0.6)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("images per device")
    axis.set_title(f"{devices} devices", fontsize=10)
    finish(axis)


def draw_curves(axes, fast, devices):
    """Validation over the epochs of the runs with one image per device."""
    group = [run for run in fast if (run["devices"], run["images"]) == (devices, 1)]
    for axis, key, label in zip(
        axes, ("mean_iou", "val_loss"), ("mIoU", "loss per pixel")
    ):
        for run in group:
            _, colour, marker = NORMS[run["norm"]]
            epochs = [entry["epoch"] for entry in run.get("epochs", [])]
            values = [entry[key] for entry in run.get("epochs", [])]
            values = [np.nan if value is None else value for value in values]
            style = {"alpha": 0.8, "linewidth": 1.3, "marker": marker, "markersize": 3}
            axis.plot(epochs, values, color=colour, **style)
        axis.set_title(f"{devices} devices, 1 image each: validation", fontsize=10)
        axis.set_ylabel(label)
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        finish(axis)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")


def draw_strip(figure, fast, devices):
    """Test images, truth, and what both norms predict with one image per device."""
    of_case = [
        run
        for run in fast
        if (run["devices"], run["images"], run["seed"]) == (devices, 1, 0)
    ]
    by_norm = {run["norm"]: run for run in of_case if "predictions" in run}
    source = next((run for run in fast if "images_shown" in run), None)
    if source is None or len(by_norm) < 2:
        return
    shown = source["images_shown"], source["truths_shown"]
    columns = {
        "image": [picture(text) for text in shown[0]],
        "truth": [labels(text, source) for text in shown[1]],
    }
    for norm, (label, _, _) in NORMS.items():
        predicted = by_norm[norm]["predictions"]
        columns[label.split(",")[0]] = [labels(text, source) for text in predicted]
    axes = figure.subplots(len(shown[0]), len(columns), squeeze=False)
    for column, (name, pictures) in zip(axes.T, columns.items()):
        column[0].set_title(name, fontsize=10)
        for axis, one in zip(column, pictures):
            axis.imshow(one, interpolation="nearest")
            axis.set_axis_off()


def picture(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def labels(text, run):
    values = picture(text).astype(int)
    count = len(run["classes"])
    return painted(np.where(values < count, values, -1), count)
