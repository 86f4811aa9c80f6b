"""The pictures of a run: curves, predictions beside the truth, an overlay.

They are drawn without a display. A class has the same colour in all of them.
"""

import textwrap

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

UNLABELLED = (255, 255, 255)


def palette(num_classes):
    """One RGB colour for each class, uint8 (num_classes, 3)."""
    k = np.arange(num_classes)
    hues = (0.02 + k * 0.618034) % 1  # the golden angle
    values = np.array([0.95, 0.75, 0.55])[k % 3]
    hsv = np.stack([hues, np.full(num_classes, 0.7), values], axis=1)
    colours = (matplotlib.colors.hsv_to_rgb(hsv) * 255).astype(np.uint8)
    colours[0] = 38, 42, 51
    return colours


def painted(label, num_classes):
    """The label map in colours; unlabelled pixels white."""
    colours = np.vstack([palette(num_classes), [UNLABELLED]]).astype(np.uint8)
    return colours[np.where(label < 0, num_classes, label)]


def save_image(path, image):
    Image.fromarray(image).save(path)


def save_predictions(path, samples, classes, heading):
    """`samples`: (image, truth, prediction) each; one row for each of them."""
    n = len(classes)
    rows = [[i, painted(t, n), painted(p, n)] for i, t, p in samples]
    shown = np.unique([maps for _, *maps in samples])
    _save_grid(path, rows, ["image", "truth", "prediction"], classes, shown, heading)


def save_overlay(path, image, prediction, classes, heading):
    colours = painted(prediction, len(classes))
    blended = (image * 0.35 + colours * 0.65).astype(np.uint8)
    rows, titles = [[image, blended]], ["image", "prediction"]
    _save_grid(path, rows, titles, classes, np.unique(prediction), heading)


def _save_grid(path, rows, titles, classes, shown, heading):
    """Rows of pictures of one shape, with titles above and the classes below."""
    height, width = rows[0][0].shape[:2]
    wide = (2.6 if len(rows) > 1 else 3.6) * max(1.0, min(2.0, width / height))
    tall = wide * height / width * len(rows) + 0.9 + 0.05 * len(shown)
    figure, axes = plt.subplots(
        len(rows), len(titles), figsize=(wide * len(titles), tall), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for row, images in zip(axes, rows):
        for axis, image in zip(row, images):
            axis.imshow(image, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
    for axis, title in zip(axes[0], titles):
        axis.set_title(title)
    figure.suptitle(heading)
    colours = palette(len(classes)) / 255
    handles = [
        # ADE20K's names have synonyms.
        Patch(color=colours[k], label=textwrap.shorten(classes[k].split(",")[0], 20))
        for k in shown
        if k >= 0
    ]
    options = {"ncol": 5, "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside lower center", **options)
    _save(figure, path)


def save_curves(path, log, heading):
    epochs = [entry["epoch"] for entry in log]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    for key, label in (("train_loss", "training"), ("val_loss", "validation")):
        left.plot(epochs, [entry[key] for entry in log], "o-", label=label)
    for key, label in (("pixel_accuracy", "pixel accuracy"), ("mean_iou", "mean IoU")):
        right.plot(epochs, [entry[key] for entry in log], "o-", label=label)
    left.set_title("loss per labelled pixel")
    left.set_ylim(bottom=0)
    right.set_title("validation")
    right.set_ylim(0, 1)
    for axis in (left, right):
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(heading)
    figure.tight_layout()
    _save(figure, path)


def _save(figure, path):
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)
