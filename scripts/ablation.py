#!/usr/bin/env python3
"""Measures the gain of synchronized batch normalization by images per device.

    python scripts/ablation.py --data-root camvid   # everything, some hours
    python scripts/ablation.py --quick              # a tiny grid of digits, a minute

Runs train_segmentation.py for FastSCNN with unsynchronized and synchronized layers on 2
and 4 devices with 1, 2 and 4 images each, and on one device with each of these batches,
with a learning rate in proportion to the batch; FCN on two devices with one image each.
Tests the last epoch with its running statistics, with recomputed ones, and with those
of each batch. A run whose JSON is in --results is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from gluon_syncbn import recompute_statistics

import mxnet as mx
import numpy as np
from benchmarks import benchmarking
from mxnet import autograd
from segmentation import model
from segmentation.data import open_split
from tables import load, summary, table

CAMVID = "Sky Building Pole Road Pavement Tree Sign Fence Car Pedestrian Bicyclist"
# Options of a model; numbers of devices, and of images on each; seeds.
GRIDS = [
    ("--model FastSCNN --crop-size 160 --epochs 8", (2, 4), (1, 2, 4), 3),
    ("--model FCN --crop-size 96 --epochs 3", (2,), (1,), 3),
]
TINY = "--model FastSCNN --crop-size 64 --epochs 1 --images 4"
QUICK = [(TINY, (2,), (1,), 1)]
# Linear scaling (Goyal et al., arXiv:1706.02677) of what train_segmentation.py takes
# for its batch: 0.1 for 8 images. No arm has a rate of its own.
RATE_PER_IMAGE = 0.1 / 8


def runs_of(grid, data):
    """Yield a description and the options of each run, seed after seed."""
    options, devices, images, seeds = grid
    pairs = [(count, each) for count in devices for each in images]
    arms = [(norm, *pair) for pair in pairs for norm in ("bn", "syncbn")]
    arms += [("syncbn", 1, n) for n in sorted({count * each for count, each in pairs})]
    for seed in range(seeds):
        for norm, count, each in arms:
            about = {"model": options.split()[1].lower(), "norm": norm}
            about.update(devices=count, images=each, seed=seed)
            own = f"--norm {norm} --num-devices {count} --seed {seed}"
            own += f" --batch-size {count * each} --lr {RATE_PER_IMAGE * count * each}"
            yield about, [*data, *options.split(), *own.split()]


def carry_out(about, options):
    """Train, test the last epoch, and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("train_segmentation.py")
        command = [sys.executable, script, *options, "--run-dir", folder]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        result = {"kind": "run", **about, "machine": benchmarking.machine()}
        if "Lower --lr" in done.stderr:
            return {**result, "diverged": done.stderr}
        if done.returncode:
            sys.exit(done.stderr)
        return {**result, "diverged": None, **tested(Path(folder))}


def tested(folder):
    """Return the scores on the test split with each kind of statistics."""
    options, classes, log = model.load(folder)
    args = model.Parser().settings(options)
    test = open_split("test", args)  # in another order: neighbours are of one film
    order = np.random.default_rng(0).permutation(len(test.items))
    test.items = [test.items[k] for k in order]
    engine = engine_to_test(args, classes, folder)
    scores = {"running": engine.evaluate(test)}
    with autograd.train_mode():  # on as many devices, together or each by itself
        scores["batch"] = engine.evaluate(test)
    # Of all training images, augmented as in one more epoch, whatever the run's batch.
    alone = model.Parser().settings([*options, "--num-devices=1", "--batch-size=16"])
    training = open_split("train", alone)
    engine = engine_to_test(alone, classes, folder)
    training.epoch = args.epochs
    recompute_statistics(engine.net, (mx.nd.array(x) for x, _ in training))
    scores["recomputed"] = engine.evaluate(test)
    found = {"settings": {**vars(args), "data_root": ""}, "classes": classes}
    return {**found, "epochs": log, "test_images": len(order), "test": scores}


def engine_to_test(args, classes, folder):
    """Return a net with a run's weights, without Dropout, which differs by device."""
    engine = model.Engine(args, len(classes))
    model.restore(engine.net, folder)
    engine.net.apply(lambda block: setattr(block, "_rate", 0))
    return engine


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", help="folder of CamVid; else digits")
    parser.add_argument("--quick", action="store_true", help="a tiny grid")
    parser.add_argument("--results", type=Path, default=Path("runs/ablation"))
    given = parser.parse_args()
    data, name = [], "digits"
    if given.data_root:
        data = ["--data-root", given.data_root, "--ignore-label", "11"]
        data, name = (
            [*data, "--class-names", CAMVID.replace(" ", ",")],
            Path(given.data_root).name,
        )
    given.results.mkdir(parents=True, exist_ok=True)
    for grid in QUICK if given.quick else GRIDS:
        for about, options in runs_of(grid, data):
            file = "{model}-{norm}-{devices}x{images}-seed{seed}.json".format(**about)
            if not (given.results / f"{name}-{file}").exists():
                text = json.dumps(carry_out(about, options), indent=1)
                (given.results / f"{name}-{file}").write_text(text + "\n")
    found = load(given.results)
    print(table(found), summary(found), sep="\n\n")


if __name__ == "__main__":
    main()
