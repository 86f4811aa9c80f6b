#!/usr/bin/env python3
"""Repeat one run of the comparison in docs/benchmarks.md, and draw the comparison.

    python scripts/ablation.py --data-root camvid --norm bn --per-device 1
    python scripts/ablation.py --draw

The first command writes JSON to --results. The second one draws the committed JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from gluon_syncbn import recompute_statistics

import mxnet as mx
import numpy as np
import tables
import train_segmentation as training
from benchmarks import benchmarking
from matplotlib.figure import Figure
from mxnet import autograd

CAMVID = (
    "Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist"
)
SIZES = {"FastSCNN": "--crop-size 160 --epochs 8", "FCN": "--crop-size 96 --epochs 3"}
NORMS = {
    "bn": "--norm bn",
    "bn-frozen": "--norm bn --freeze-epochs 2",
    "syncbn": "--norm syncbn",
    "gn8": "--norm gn --group-size 8",
    "gn32": "--norm gn --group-size 32",
}


def repeat(options, more):
    """Train a net in a new process, test it, and write its scores."""
    about = {"model": options.model.lower(), "norm": options.norm, "seed": options.seed}
    about.update(devices=options.devices, images=options.per_device)
    batch, folder = options.devices * options.per_device, options.results / "run"
    # The highest learning rate grows with the batch (Goyal et al., arXiv:1706.02677).
    line = f"--model {options.model} {SIZES[options.model]} {NORMS[options.norm]}"
    line += f" --seed {options.seed} --num-devices {options.devices}"
    line += f" --batch-size {batch} --lr {batch / 80} --overwrite --run-dir {folder}"
    data = ["--data-root", options.data_root, "--ignore-label", "11"]
    data += ["--class-names", CAMVID]
    script = [sys.executable, training.__file__, *line.split(), *data, *more]
    subprocess.run(script, check=True)
    result = {"kind": "run", **about, "machine": benchmarking.machine(), **test(folder)}
    file = "camvid-{model}-{norm}-{devices}x{images}-seed{seed}.json".format(**about)
    (options.results / file).write_text(json.dumps(result, indent=1) + "\n")
    print(tables.table(tables.load(options.results)))


def test(folder):
    """Return the log of a run and its test scores with three kinds of statistics."""
    args, classes, log = training.load(folder)
    split = training.Split("test", args)
    # Neighbouring images come from one film, so a batch of them would be too uniform.
    np.random.default_rng(0).shuffle(split.items)
    engine = engine_to_test(args, classes, folder, log)
    scores = {"running": engine.evaluate(split.loader)}
    if args.norm == "gn":  # it has no statistics of the batch
        return {"classes": classes, "epochs": log, "test": scores}
    with autograd.train_mode():
        scores["batch"] = engine.evaluate(split.loader)
    # One more epoch of augmented images, in batches of the same size for all runs.
    args.num_devices, args.batch_size = 1, 16
    images = training.Split("train", args)
    images.start_epoch(args.epochs)
    engine = engine_to_test(args, classes, folder, log)
    recompute_statistics(engine.net, (mx.nd.array(x) for x, _ in images.loader))
    scores["recomputed"] = engine.evaluate(split.loader)
    return {"classes": classes, "epochs": log, "test": scores}


def engine_to_test(args, classes, folder, log):
    """Return an engine with the weights of a run, without dropout."""
    engine = training.Engine(args, len(classes)).restore(folder, log)
    engine.net.apply(lambda block: setattr(block, "_rate", 0))  # a field of Dropout
    return engine


def draw(folder=tables.RESULTS / "ablation"):
    """Draw FastSCNN's scores on two and on four devices."""
    arms = tables.load(folder)
    figure = Figure((5, 6.4), layout="constrained", facecolor="white")
    upper, lower = figure.subplots(2, 1, sharex=True)
    styles = "C3s-", "0.5s:", "C0o-", "C2^-"
    # The last norm, GroupNorm, was compared on two devices.
    for axis, devices, count in (upper, 2, 4), (lower, 4, 3):
        for (label, (norm, kind)), style in zip(tables.NORMS.items(), styles[:count]):
            runs = [tables.runs_of(arms, norm, devices, each) for each in (1, 2, 4)]
            scores = [[run["test"][kind]["mean_iou"] for run in arm] for arm in runs]
            means, spread = map(statistics.fmean, scores), map(statistics.stdev, scores)
            options = {"c": style[:-2], "fmt": style[-2:], "capsize": 4}
            options["label"] = label.replace("`", "")
            axis.errorbar(range(3), [*means], [*spread], **options)
        axis.set(ylim=(0, 0.38), ylabel="mIoU", xticks=range(3), xticklabels="124")
        axis.set_title(f"{devices} devices")
        axis.grid(alpha=0.3)
    lower.set_xlabel("images per device")
    upper.legend(loc="lower right")
    figure.savefig(folder / "ablation.png", dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--draw", action="store_true", help="draw the committed runs")
    add("--data-root", default="camvid", help="a folder with the images of CamVid")
    add("--model", choices=list(SIZES), default="FastSCNN")
    add("--norm", choices=list(NORMS), default="syncbn")
    add("--devices", type=int, default=2)
    add("--per-device", type=int, default=1, help="images in a batch on each device")
    add("--seed", type=int, default=0)
    add("--results", type=Path, default=Path("runs/ablation"))
    options, more = parser.parse_known_args()  # the rest goes to the training
    if options.draw:
        return draw()
    options.results.mkdir(parents=True, exist_ok=True)
    repeat(options, more)


if __name__ == "__main__":
    main()
