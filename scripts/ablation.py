#!/usr/bin/env python3
"""Compare nets that are trained with and without synchronized batch normalization.

    python scripts/ablation.py --data-root camvid   # all runs, some hours
    python scripts/ablation.py --quick              # three tiny runs, a minute

docs/benchmarks.md describes the runs. A run whose JSON is in --results is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gluon_syncbn import recompute_statistics

import mxnet as mx
import numpy as np
from benchmarks import benchmarking
from mxnet import autograd
from segmentation import model
from segmentation.data import open_split
from tables import load, summary, table

CAMVID = "Sky Building Pole Road Pavement Tree Sign Fence Car Pedestrian Bicyclist"
# (a model's options, numbers of devices, numbers of images per device, seed count)
GRIDS = [
    ("--model FastSCNN --crop-size 160 --epochs 8", (2, 4), (1, 2, 4), 3),
    ("--model FCN --crop-size 96 --epochs 3", (2,), (1,), 3),
]
TINY = "--model FastSCNN --crop-size 64 --epochs 1 --images 4"
QUICK = [(TINY, (2,), (1,), 1)]
# The default learning rate of train_segmentation.py is 0.1, for 8 images. Every run
# scales this rate linearly with its batch (Goyal et al., arXiv:1706.02677).
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


def train_and_test(about, options):
    """Train a net in a new process; return its scores, or why it diverged."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("train_segmentation.py")
        command = [sys.executable, script, *options, "--run-dir", folder]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        result = {"kind": "run", **about, "machine": benchmarking.machine()}
        if "Lower --lr" in done.stderr:
            return {**result, "diverged": done.stderr}
        if done.returncode:
            sys.exit(done.stderr)
        return {**result, "diverged": None, **test(Path(folder))}


def test(folder):
    """Test the net of a run; return its settings, log of epochs, and test scores."""
    options, classes, log = model.load(folder)
    args = model.Parser().settings(options)
    split = open_split("test", args)
    # Neighbouring images come from one film, so a batch of them would be too uniform.
    order = np.random.default_rng(0).permutation(len(split.items))
    split.items = [split.items[k] for k in order]
    engine = engine_to_test(args, classes, folder)
    scores = {"running": engine.evaluate(split)}
    with autograd.train_mode():
        scores["batch"] = engine.evaluate(split)
    # The statistics are recomputed over all training images, augmented as in one more
    # epoch, with the same batch size for all runs.
    alone = model.Parser().settings([*options, "--num-devices=1", "--batch-size=16"])
    training = open_split("train", alone)
    engine = engine_to_test(alone, classes, folder)
    training.epoch = args.epochs
    recompute_statistics(engine.net, (mx.nd.array(x) for x, _ in training))
    scores["recomputed"] = engine.evaluate(split)
    result = {"settings": {**vars(args), "data_root": ""}, "classes": classes}
    return {**result, "epochs": log, "test_images": len(order), "test": scores}


def engine_to_test(args, classes, folder):
    """Return an engine with the weights of a run, with dropout disabled."""
    engine = model.Engine(args, len(classes))
    model.restore(engine.net, folder)
    engine.net.apply(lambda block: setattr(block, "_rate", 0))  # a field of Dropout
    return engine


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", help="use this folder of CamVid, not digits")
    parser.add_argument("--quick", action="store_true", help="do three tiny runs")
    parser.add_argument("--results", type=Path, default=Path("runs/ablation"))
    arguments = parser.parse_args()
    data, name, results = [], "digits", arguments.results
    if arguments.data_root:
        data = ["--data-root", arguments.data_root, "--ignore-label", "11"]
        data += ["--class-names", CAMVID.replace(" ", ",")]
        name = Path(arguments.data_root).name
    results.mkdir(parents=True, exist_ok=True)
    for grid in QUICK if arguments.quick else GRIDS:
        for about, options in runs_of(grid, data):
            file = "{model}-{norm}-{devices}x{images}-seed{seed}.json".format(**about)
            path = results / f"{name}-{file}"
            if not path.exists():
                result = train_and_test(about, options)
                path.write_text(json.dumps(result, indent=1) + "\n")
    arms = load(results)
    print(table(arms), summary(arms, devices=2), sep="\n\n")


if __name__ == "__main__":
    main()
