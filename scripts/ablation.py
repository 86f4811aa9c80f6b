#!/usr/bin/env python3
"""Repeat one run of the comparison in docs/benchmarks.md, and draw the comparison.

    python scripts/ablation.py --data-root camvid --norm bn --devices 2 --images 1
    python scripts/ablation.py --draw

The first command writes JSON to --results. The second one draws the committed JSON.
"""

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
from pathlib import Path

from gluon_syncbn import recompute_statistics

import mxnet as mx
import numpy as np
import train_segmentation as training
from benchmarks import benchmarking
from matplotlib.figure import Figure
from mxnet import autograd
from PIL import Image
from tables import RESULTS, load, table

CAMVID = (
    "Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist"
)
SIZES = {"FastSCNN": "--crop-size 160 --epochs 8", "FCN": "--crop-size 96 --epochs 3"}


def repeat(options, more):
    """Train a net in a new process, test it, and write its scores."""
    about = {
        key: getattr(options, key) for key in ("norm", "devices", "images", "seed")
    }
    about = {"model": options.model.lower(), **about}
    batch, folder = options.devices * options.images, options.results / "run"
    # The highest learning rate grows with the batch (Goyal et al., arXiv:1706.02677).
    line = f"--model {options.model} {SIZES[options.model]} --norm {options.norm}"
    line += f" --seed {options.seed} --num-devices {options.devices}"
    line += f" --batch-size {batch} --lr {batch / 80}"
    name, data = "digits", []
    if options.data_root:
        name, data = Path(options.data_root).name, ["--data-root", options.data_root]
        data += ["--ignore-label", "11", "--class-names", CAMVID]
    script = [sys.executable, training.__file__, *line.split(), *data, *more]
    subprocess.run([*script, "--run-dir", folder, "--overwrite"], check=True)
    result = {"kind": "run", **about, "machine": benchmarking.machine(), **test(folder)}
    file = "{model}-{norm}-{devices}x{images}-seed{seed}.json".format(**about)
    (options.results / f"{name}-{file}").write_text(json.dumps(result, indent=1) + "\n")
    print(table(load(options.results)))


def test(folder):
    """Return the log of a run and its test scores with three kinds of statistics."""
    args, classes, log = training.load(folder)
    split = training.Split("test", args)
    # Neighbouring images come from one film, so a batch of them would be too uniform.
    split.items = [
        split.items[k] for k in np.random.default_rng(0).permutation(len(split.items))
    ]
    engine = training.Engine(args, len(classes)).restore(folder, log)
    scores = {"running": engine.evaluate(split.loader)}
    engine.net.apply(lambda block: setattr(block, "_rate", 0))  # disables Dropout
    with autograd.train_mode():
        scores["batch"] = engine.evaluate(split.loader)
    # One more epoch of augmented images, in batches of the same size for all runs.
    args.num_devices, args.batch_size = 1, 16
    images = training.Split("train", args)
    images.start_epoch(args.epochs)
    engine = training.Engine(args, len(classes)).restore(folder, log)
    engine.net.apply(lambda block: setattr(block, "_rate", 0))
    recompute_statistics(engine.net, (mx.nd.array(x) for x, _ in images.loader))
    scores["recomputed"] = engine.evaluate(split.loader)
    return {"classes": classes, "epochs": log, "test": scores}


def draw(folder=RESULTS / "ablation"):
    """Draw FastSCNN's scores on two and four devices, and predictions on two."""
    arms = load(folder)
    figure = Figure((5, 6.4), layout="constrained", facecolor="white")
    lines = [
        ("SyncBatchNorm", "syncbn", "running", "o-"),
        ("nn.BatchNorm, recomputed", "bn", "recomputed", "s:"),
        ("nn.BatchNorm", "bn", "running", "s-"),
    ]
    for axis, devices in zip(figure.subplots(2, 1, sharex=True), (2, 4)):
        for colour, (label, norm, kind, style) in zip(("C0", "0.5", "C3"), lines):
            runs = [arms["fastscnn", devices, each, norm] for each in (1, 2, 4)]
            scores = [[run["test"][kind]["mean_iou"] for run in arm] for arm in runs]
            means, errors = ([f(s) for s in scores] for f in MEAN_AND_DEVIATION)
            axis.errorbar(
                range(3), means, errors, fmt=style, c=colour, label=label, capsize=4
            )
        axis.set(ylim=(0, 0.38), ylabel="mIoU", xticks=range(3), xticklabels="124")
        axis.set_title(f"{devices} devices")
        axis.grid(alpha=0.3)
    axis.set_xlabel("images per device")
    axis.legend(loc="lower right")
    figure.savefig(folder / "ablation.svg", metadata={"Date": None})

    bn, syncbn = (arms["fastscnn", 2, 1, norm][0] for norm in ("bn", "syncbn"))
    columns = {
        "image": [decoded(text) for text in bn["images_shown"][:3]],
        "truth": labels(bn["truths_shown"]),
        "nn.BatchNorm": labels(bn["predictions"]),
        "SyncBatchNorm": labels(syncbn["predictions"]),
    }
    training.save_picture(folder / "predictions.png", columns, bn["classes"])


MEAN_AND_DEVIATION = statistics.fmean, statistics.stdev


def decoded(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def labels(texts):
    maps = (decoded(text).astype(int) for text in texts[:3])
    return [training.painted(np.where(m == 255, -1, m)) for m in maps]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--draw", action="store_true", help="draw the committed runs")
    add("--data-root", help="a folder of CamVid; without it, digits")
    add("--model", choices=list(SIZES), default="FastSCNN")
    add("--norm", choices=list(training.NORMS), default="syncbn")
    add("--devices", type=int, default=2)
    add("--images", type=int, default=1, help="images per device")
    add("--seed", type=int, default=0)
    add("--results", type=Path, default=Path("runs/ablation"))
    options, more = parser.parse_known_args()  # the rest goes to the training
    if options.draw:
        return draw()
    options.results.mkdir(parents=True, exist_ok=True)
    repeat(options, more)


if __name__ == "__main__":
    main()
