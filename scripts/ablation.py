#!/usr/bin/env python3
"""Measures the gain of synchronized batch normalization by images per device.

    python scripts/ablation.py --data-root camvid   # everything, some hours
    python scripts/ablation.py --quick              # a tiny grid of digits, a minute
    python scripts/ablation.py --draw --results scripts/results/ablation

Trains FastSCNN with unsynchronized and with synchronized layers on 2 and 4 devices with
1, 2 and 4 images each, and on one device with each of these batches, from the same
initial parameters, in the same order, with the same augmentation and a learning rate in
proportion to the batch; FCN-ResNet-50 on two devices with one image each. The last
epoch is tested, with its running statistics, with those recomputed from the training
images, and with those of each batch. --data-root is a folder as train_segmentation.py
takes it, with CamVid's classes. A run whose JSON is in --results is not made again.
"""

import argparse
import base64
import io
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import mxnet as mx
import numpy as np
from matplotlib import pyplot
from mxnet import autograd
from mxnet.gluon import nn
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from gluon_syncbn import recompute_statistics

from benchmarks import benchmarking
from segmentation.config import Config
from segmentation.data import Batches, open_datasets, open_split
from segmentation.engine import Engine
from segmentation.errors import Diverged
from segmentation.pictures import painted
from tables import load, score, select, summary, table

CAMVID = {
    "class_names": "Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,"
    "Pedestrian,Bicyclist",
    "ignore_label": 11,
}
# The settings of a model; numbers of devices, and of images on each; seeds.
GRIDS = [
    ({"model": "fastscnn", "crop_size": 160, "epochs": 8}, (2, 4), (1, 2, 4), 3),
    ({"model": "fcn", "crop_size": 96, "epochs": 3}, (2,), (1,), 3),
]
TINY = {"crop_size": 64, "epochs": 1, "train_images": 8, "val_images": 4}
QUICK = [({"model": "fastscnn", **TINY}, (2,), (1,), 1)]
# Linear scaling (Goyal et al., arXiv:1706.02677) of what train_segmentation.py takes
# for its batch: 0.1 for 8 images. No arm has a rate of its own.
RATE_PER_IMAGE = 0.1 / 8
NORMS = {"bn": "nn.BatchNorm, each device alone", "syncbn": "SyncBatchNorm"}
STYLES = {
    "bn": {"color": "tab:gray", "marker": "s"},
    "syncbn": {"color": "tab:blue", "marker": "o"},
    "one device": {"color": "tab:orange", "marker": "_", "markersize": 11},
}


def runs_of(grid, data):
    """Yields a description and the settings of each run, seed after seed."""
    settings, devices, images, seeds = grid
    pairs = [(count, each) for count in devices for each in images]
    arms = [(norm, *pair) for pair in pairs for norm in NORMS]
    arms += [("syncbn", 1, n) for n in sorted({count * each for count, each in pairs})]
    for seed in range(seeds):
        for norm, count, each in arms:
            own = {"norm": norm, "num_devices": count, "seed": seed}
            own.update(batch_size=count * each, lr=RATE_PER_IMAGE * count * each)
            about = {"kind": "run", "model": settings["model"], "seed": seed}
            about.update(norm=norm, devices=count, images=each)
            yield about, Config.from_dict({**data, **settings, **own})


def carry_out(about, config):
    """Train, test the last epoch, and return the result."""
    train_set, val_set = open_datasets(config)
    batches = Batches(train_set, config, training=True)
    val_batches = Batches(val_set, config, training=False)
    engine = Engine(config, len(train_set.classes), batches.count)
    settings = {k: v for k, v in asdict(config).items() if k != "data_root"}
    result = {**about, "settings": settings, "machine": benchmarking.machine()}
    result.update(train_images=len(train_set), classes=train_set.classes, epochs=[])
    try:
        for epoch in range(config.epochs):
            loss = engine.train_epoch(batches, epoch)
            entry = {"epoch": epoch + 1, "train_loss": loss}
            result["epochs"].append({**entry, **scored(engine, val_batches)})
            print(result["epochs"][-1], flush=True)
    except Diverged as error:
        return {**result, "diverged": str(error)}
    with tempfile.NamedTemporaryFile(suffix=".params") as weights:
        engine.net.save_parameters(weights.name)
        return {**result, "diverged": None, **tested(config, train_set, weights.name)}


def tested(config, train_set, weights):
    """Scores on the test split with each kind of statistics; predictions."""
    test_set = Shuffled(open_split("test", config))
    batches = Batches(test_set, config, training=False)
    engine = engine_to_test(config, len(train_set.classes), weights)
    views = [batches.view(0, k) for k in range(min(4, len(test_set)))]
    predictions, _ = engine.predict(*batches.assemble(views))
    scores = {"running": scored(engine, batches)}
    with autograd.train_mode():  # on as many devices, together or each by itself
        scores["batch"] = scored(engine, batches)
    # Of all training images, augmented as in one more epoch, whatever the run's batch.
    alone = replace(config, num_devices=1, batch_size=16)
    engine = engine_to_test(alone, len(train_set.classes), weights)
    training = Batches(train_set, alone, training=True).epoch(config.epochs)
    recompute_statistics(engine.net, (mx.nd.array(x) for x, _ in training))
    scores["recomputed"] = scored(engine, batches)
    return {
        "test_images": len(test_set),
        "test": scores,
        "predictions": [encoded(prediction) for prediction in predictions],
        "images_shown": [encoded(image) for image, _ in views],
        "truths_shown": [encoded(truth) for _, truth in views],
    }


def engine_to_test(config, num_classes, weights):
    """A net with these weights; without Dropout, which differs between devices."""

    def without_dropout(block):
        if isinstance(block, nn.Dropout):
            block._rate = 0

    engine = Engine(config, num_classes, steps_per_epoch=1)
    engine.net.load_parameters(weights)
    engine.net.apply(without_dropout)
    return engine


def scored(engine, batches):
    loss, confusion = engine.evaluate(batches)
    scores = {"val_loss": loss, "pixel_accuracy": confusion.pixel_accuracy()}
    return {**scores, "mean_iou": confusion.mean_iou()}


class Shuffled:
    """A data set in another order, the same always: neighbours are of one film."""

    def __init__(self, dataset):
        self._order = np.random.default_rng(0).permutation(len(dataset))
        self.load = lambda index: dataset.load(int(self._order[index]))

    def __len__(self):
        return len(self._order)


def encoded(array):
    """A picture, or labels of which 255 is unlabelled, as the text of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def draw(found):
    """mIoU over images per device; curves of the one-image case; a few images."""
    pyplot.style.use(Path(__file__).with_name("figures.mplstyle"))
    fast = {name: run for name, run in found.items() if run["model"] == "fastscnn"}
    counts = sorted({run["devices"] for run in fast.values()} - {1})
    figure = pyplot.figure(figsize=(13, 7.6))
    left, right = figure.subfigures(1, 2, width_ratios=[1.25, 1])
    upper, lower = left.subfigures(2)
    axes = upper.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axis, count in zip(axes, counts):
        draw_scores(axis, fast, count)
    axes[0].set_ylabel("mIoU on the test split")
    one_image = select(fast, devices=counts[0], images=1)
    mean_iou, val_loss = lower.subplots(1, 2)
    draw_curves(mean_iou, one_image, "mean_iou", "mIoU")
    draw_curves(val_loss, one_image, "val_loss", "loss per pixel")
    mean_iou.set_ylim(bottom=0)
    val_loss.set_yscale("log")
    draw_pictures(right, one_image)
    figure.suptitle(f"FastSCNN on {next(iter(fast)).split('-')[0]}", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=10, loc="outside lower center", ncol=3)
    return figure


def draw_scores(axis, fast, devices):
    """A point for each seed, a line through the means; one device as dashes."""
    images = sorted({run["images"] for run in select(fast, devices=devices)})

    def plot(label, style, shift, kind, count, per_device, norm):
        """Scores of the runs on `count` devices with so many images each."""
        x = np.arange(len(images)) + shift
        scores = []
        for n in images:
            runs = select(fast, devices=count, images=n * per_device, norm=norm)
            scores.append([score(run, kind) for run in runs])
            points = {**style, "linestyle": "", "alpha": 0.55}
            axis.plot([x[len(scores) - 1]] * len(runs), scores[-1], **points)
        axis.plot(x, list(map(np.mean, scores)), label=label, **style)

    for (norm, label), shift in zip(NORMS.items(), (-0.07, 0.07)):
        plot(label, STYLES[norm], shift, "running", devices, 1, norm)
        style = {**STYLES[norm], "markerfacecolor": "none", "linestyle": ":"}
        plot(f"{label}, recomputed", style, shift, "recomputed", devices, 1, norm)
    style = {**STYLES["one device"], "linestyle": ""}
    plot("one device, whole batch", style, 0.21, "running", 1, devices, "syncbn")
    axis.set_xticks(range(len(images)), images)
    axis.set(xlim=(-0.4, len(images) - 0.6), ylim=(0, None))
    axis.set(title=f"{devices} devices", xlabel="images per device")
    axis.grid()


def draw_curves(axis, runs, key, label):
    """Validation over the epochs of these runs."""
    for run in runs:
        epochs = [entry["epoch"] for entry in run["epochs"]]
        values = [entry[key] for entry in run["epochs"]]
        style = {"alpha": 0.8, "linewidth": 1.3, "markersize": 3}
        axis.plot(epochs, values, **STYLES[run["norm"]], **style)
    title = f"{runs[0]['devices']} devices, 1 image each: validation"
    axis.set(title=title, xlabel="epoch", ylabel=label)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid()


def draw_pictures(figure, runs):
    """Test images, truth, and what both norms predict, of the first seed."""
    runs = {run["norm"]: run for run in runs if run["seed"] == 0 and "test" in run}
    if len(runs) < len(NORMS):
        return  # one has diverged
    first = runs["bn"]
    columns = {"image": first["images_shown"], "truth": first["truths_shown"]}
    for norm, label in NORMS.items():
        columns[label.split(",")[0]] = runs[norm]["predictions"]
    axes = figure.subplots(len(columns["image"]), len(columns), squeeze=False)
    for column, (name, texts) in zip(axes.T, columns.items()):
        column[0].set_title(name, fontsize=8)
        for axis, text in zip(column, texts):
            shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
            if name != "image":
                shown, count = shown.astype(int), len(first["classes"])
                shown = painted(np.where(shown < count, shown, -1), count)
            axis.imshow(shown, interpolation="nearest")
            axis.set_axis_off()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data-root", type=Path, metavar="DIR", help="folder of CamVid; else digits")
    add("--quick", action="store_true", help="a tiny grid, to see that all works")
    add("--results", type=Path, metavar="DIR", help="default: runs/ablation[-quick]")
    add("--draw", action="store_true", help="only draw the figure and print the tables")
    options = parser.parse_args()
    root = options.data_root
    data = {"dataset": "folder", "data_root": str(root), **CAMVID} if root else {}
    results = options.results or Path(f"runs/ablation{'-quick' * options.quick}")
    results.mkdir(parents=True, exist_ok=True)
    grids = [] if options.draw else QUICK if options.quick else GRIDS
    for about, config in (run for grid in grids for run in runs_of(grid, data)):
        name = "{model}-{norm}-{devices}x{images}-seed{seed}.json".format(**about)
        name = f"{root.resolve().name if root else 'digits'}-{name}"
        if not (results / name).exists():
            print(name, flush=True)
            text = json.dumps(carry_out(about, config), indent=1)
            (results / name).write_text(text + "\n")
    found = load(results)
    if not found:
        sys.exit(f"The folder {results} holds no result of a run.")
    print(table(found), summary(found), sep="\n\n")
    draw(found).savefig(results / "ablation.png", dpi=120)
    print(f"written to {results / 'ablation.png'}")


if __name__ == "__main__":
    main()
