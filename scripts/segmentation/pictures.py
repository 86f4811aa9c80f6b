"""The pictures of a run: curves, predictions beside the truth, an overlay.

They are drawn without a display. A class has the same colour in all of them.
"""

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch


def palette(num_classes):
    """One RGB colour for each class, uint8 (num_classes, 3); the first is dark."""
    k = np.arange(num_classes)
    hues, values = (0.02 + k * 0.618034) % 1, np.array([0.95, 0.75, 0.55])[k % 3]
    hsv = np.stack([hues, np.full(num_classes, 0.7), values], axis=1)
    colours = (matplotlib.colors.hsv_to_rgb(hsv) * 255).astype(np.uint8)
    colours[0] = 38, 42, 51
    return colours


def painted(label, num_classes):
    """The label map in colours; unlabelled pixels white."""
    colours = np.vstack([palette(num_classes), np.full(3, 255, np.uint8)])
    return colours[np.where(label < 0, num_classes, label)]


def save_predictions(path, rows, classes, heading):
    """Draw an image, its label map and the predicted one in each row."""
    n = len(classes)
    drawn = [(i, painted(truth, n), painted(p, n)) for i, truth, p in rows]
    shown = np.unique([maps for _, *maps in rows])
    titles = "image", "truth", "prediction"
    _save_grid(path, drawn, titles, classes, shown, heading)


def save_overlay(path, image, prediction, classes, heading):
    colours = painted(prediction, len(classes))
    blended = (image * 0.35 + colours * 0.65).astype(np.uint8)
    shown, titles = np.unique(prediction), ("image", "prediction")
    _save_grid(path, [(image, blended)], titles, classes, shown, heading)


def _save_grid(path, rows, titles, classes, shown, heading):
    """Rows of pictures of one shape, with titles above and the classes below."""
    height, width = rows[0][0].shape[:2]
    size = 9, 9 / len(titles) * height / width * len(rows) + 1.5
    figure, axes = plt.subplots(
        len(rows), len(titles), figsize=size, squeeze=False, layout="constrained"
    )
    for row, images in zip(axes, rows):
        for axis, image in zip(row, images):
            axis.imshow(image, interpolation="nearest")
            axis.set_axis_off()
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=10)
    figure.suptitle(heading)
    colours = palette(len(classes)) / 255
    handles = [Patch(color=colours[k], label=classes[k][:20]) for k in shown if k >= 0]
    options = {"ncol": 5, "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside lower center", **options)
    _save(figure, path)


def save_curves(path, log, heading):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    losses = {"train_loss": "training", "val_loss": "validation"}
    _draw(left, log, losses, "loss per labelled pixel")
    scores = {"pixel_accuracy": "pixel accuracy", "mean_iou": "mean IoU"}
    _draw(right, log, scores, "validation")
    right.set_ylim(0, 1)
    figure.suptitle(heading)
    _save(figure, path)


def _draw(axis, log, labels, title):
    epochs = [entry["epoch"] for entry in log]
    for key, label in labels.items():
        axis.plot(epochs, [entry[key] for entry in log], "o-", label=label)
    axis.set(title=title, xlabel="epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)


def _save(figure, path):
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)
