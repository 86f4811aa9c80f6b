"""The report of a run: the table of epochs, the curves, the panel, an overlay.

Pictures are drawn without a display and replaced atomically. A class has the same
colour in all of them.
"""

import textwrap

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from .files import replacing

UNLABELLED = (255, 255, 255)
# Told apart by eye and by most colour-blind eyes on the dark first colour.
_FIRST = (
    (38, 42, 51), (230, 80, 60), (66, 133, 244), (52, 168, 83), (250, 187, 5),
    (155, 89, 208), (0, 188, 200), (240, 98, 176), (140, 110, 90), (170, 200, 60),
    (250, 140, 40), (110, 130, 150),
)  # fmt: skip


def palette(num_classes):
    """One RGB colour for each class, uint8 (num_classes, 3)."""
    colours = list(_FIRST[:num_classes])
    for k in range(len(colours), num_classes):  # further ones: the golden angle in hue
        hue, value = (k * 0.618034) % 1, (0.95, 0.75, 0.55)[k % 3]
        rgb = matplotlib.colors.hsv_to_rgb((hue, 0.65, value))
        colours.append(tuple(int(255 * part) for part in rgb))
    return np.array(colours, np.uint8)


def painted(label, num_classes):
    """The label map in colours; unlabelled pixels white."""
    colours = np.vstack([palette(num_classes), [UNLABELLED]]).astype(np.uint8)
    return colours[np.where(label < 0, num_classes, label)]


def blended(image, label, num_classes, share=0.65):
    colours = painted(label, num_classes)
    return (image * (1 - share) + colours * share).astype(np.uint8)


def _save(figure, path):
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120, facecolor="white")
    plt.close(figure)


def _legend(figure, classes, shown):
    """The classes in `shown` below the pictures; ADE20K's names have synonyms."""
    colours = palette(len(classes)) / 255
    names = {k: textwrap.shorten(classes[k].split(",")[0], 20) for k in shown if k >= 0}
    entries = [(colours[k], name) for k, name in names.items()]
    entries += [("white", "unlabelled")] * (-1 in shown)
    handles = [Patch(facecolor=c, edgecolor="0.6", label=name) for c, name in entries]
    longest = max(len(name) for _, name in entries)
    columns = int(figure.get_figwidth() / (0.55 + 0.085 * longest))
    options = {"ncol": max(1, columns), "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside lower center", **options)


def _grid(rows, titles, classes, shown, heading):
    """Rows of pictures of one shape, with titles above and a legend below."""
    height, width = rows[0][0].shape[:2]
    wide = (2.6 if len(rows) > 1 else 3.6) * max(1.0, min(2.0, width / height))
    lines = 1 + len(shown) // 5  # of the legend, about
    tall = wide * height / width * len(rows) + 0.7 + 0.22 * lines
    figure, axes = plt.subplots(
        len(rows), len(titles), figsize=(wide * len(titles), tall), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for row, pictures in zip(axes, rows):
        for axis, picture in zip(row, pictures):
            axis.imshow(picture, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_edgecolor("0.75")
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=11)
    figure.suptitle(heading, fontsize=12)
    _legend(figure, classes, shown)
    return figure


def save_panel(path, samples, classes, heading):
    """`samples`: (image, truth, prediction) each; one row for each of them."""
    n = len(classes)
    rows = [[i, painted(t, n), painted(p, n)] for i, t, p in samples]
    shown = sorted({int(k) for _, t, p in samples for k in np.unique([t, p])})
    shown = [k for k in shown if k >= 0] + [-1] * (-1 in shown)
    _save(_grid(rows, ["image", "truth", "prediction"], classes, shown, heading), path)


def save_overlay(path, image, prediction, classes, heading):
    shown = [int(k) for k in np.unique(prediction)]
    rows = [[image, blended(image, prediction, len(classes))]]
    _save(_grid(rows, ["image", "prediction"], classes, shown, heading), path)


def save_curves(path, log, heading):
    epochs = [entry["epoch"] for entry in log]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    style = {"marker": "o", "markersize": 3.5, "linewidth": 1.8}
    left.plot(epochs, [e["train_loss"] for e in log], label="training", **style)
    left.plot(epochs, [e["val_loss"] for e in log], label="validation", **style)
    left.set_title("loss per labelled pixel")
    left.set_ylim(bottom=0)
    right.plot(
        epochs, [e["pixel_accuracy"] for e in log], label="pixel accuracy", **style
    )
    right.plot(epochs, [e["mean_iou"] for e in log], label="mean IoU", **style)
    right.set_title("validation")
    right.set_ylim(0, 1)
    for axis in (left, right):
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(heading, fontsize=12)
    figure.tight_layout()
    _save(figure, path)


def table(log):
    """The epochs as lines of text."""
    lines = [
        "epoch  train loss  val loss  pixAcc   mIoU  seconds  "
        "waits: data / other devices"
    ]
    for e in log:
        waits = " / ".join(f"{share:.0%}" for share in e["waits"].values())
        lines.append(
            f"{e['epoch']:5d}  {e['train_loss']:10.4f}  {e['val_loss']:8.4f}  "
            f"{e['pixel_accuracy']:6.3f}  {e['mean_iou']:5.3f}  {e['seconds']:7.1f}  "
            f"{waits:>14}"
        )
    return "\n".join(lines)
