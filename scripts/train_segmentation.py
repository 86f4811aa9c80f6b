#!/usr/bin/env python3
"""Train a GluonCV segmentation model with synchronized batch norm on several devices.

    python scripts/train_segmentation.py                # digits, two CPU contexts
    python scripts/train_segmentation.py --data-root VOC2012 --class-names A,B,C
    python scripts/train_segmentation.py --resume runs/digits-FastSCNN-syncbn

The script writes run.json, parameters, momenta, curves and predictions to a run folder.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from gluon_syncbn import distributed

import numpy as np
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from segmentation import model
from segmentation.data import UserError, assemble, open_split, painted, save_picture
from tqdm import tqdm


def main():
    parser = model.Parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--run-dir", type=Path, help="default: runs/DATA-MODEL-NORM")
    add("--resume", type=Path, metavar="RUN_DIR", help="continue the run in a folder")
    add("--overwrite", action="store_true", help="replace the run in the folder")
    add("--distributed", action="store_true", help="use all processes of mpirun")
    arguments, options, log = parser.parse_args(), sys.argv[1:], []
    if arguments.distributed:
        distributed.init()
    if arguments.resume:
        earlier, _, log = model.load(arguments.resume)
        options = earlier + options
    args = parser.settings(options)
    name = Path(args.data_root or "digits").absolute().name
    default = Path("runs", f"{name}-{args.model}-{args.norm}")
    folder = arguments.resume or arguments.run_dir or default
    if (folder / "run.json").exists() and not (arguments.resume or arguments.overwrite):
        raise UserError(f"{folder} has a run: add --overwrite, --resume or --run-dir.")
    if len(log) >= args.epochs:
        raise UserError(f"The run in {folder} is finished: it has {len(log)} epochs.")
    folder.mkdir(parents=True, exist_ok=True)
    is_first = distributed.rank() == 0
    lock = FileLock(folder / ".lock", timeout=0) if is_first else nullcontext()
    try:
        with lock:
            train(args, folder, log)
    except Timeout:
        raise UserError(f"{folder} is in use by another process.") from None


def train(args, folder, log):
    """Train until the last epoch. Only rank 0 writes files."""
    batches, val = open_split("train", args), open_split("val", args)
    classes, is_writer = batches.classes, distributed.rank() == 0
    engine = model.Engine(args, len(classes), len(batches.sampler), len(log))
    if log:
        model.restore(engine.net, folder, engine.optimizer)
    for epoch in range(len(log), args.epochs):
        batches.epoch = epoch
        bar = tqdm(batches, f"epoch {epoch + 1}", leave=False, disable=None)
        with np.errstate(invalid="ignore"):
            log.append({"train_loss": engine.train_epoch(bar, epoch)})
            log[-1].update(engine.evaluate(val))
        if not np.isfinite([*log[-1].values()]).all():
            advice = "Lower --lr. If no pixel has a label, check --ignore-label."
            raise UserError(f"Results must be finite, got {log[-1]}. {advice}")
        if is_writer:
            model.save(folder, engine, classes, log)
            scores = (f"{key} {value:.4f}" for key, value in log[-1].items())
            print(f"epoch {epoch + 1}:", *scores, flush=True)
    if is_writer:
        draw(engine, val, folder, log, f"{args.model}, {args.norm}")


def draw(engine, val, folder, log, title):
    """Draw the curves, and a few images beside their labels and predictions."""
    figure, epochs = Figure((9.5, 3.8), layout="constrained"), range(1, len(log) + 1)
    for k, axis in enumerate(figure.subplots(1, 2)):
        keys = model.CURVES[2 * k : 2 * k + 2]
        values = [[entry[key] for key in keys] for entry in log]
        axis.plot(epochs, values, "o-", label=keys)
        axis.legend()
        axis.set(xlabel=f"epoch of {title}", ylim=(0, None))
    figure.savefig(folder / "curves.png", dpi=120)
    views = [val[k] for k in range(min(4, len(val.items)))]
    predicted, classes = engine.predict(*assemble(views))[1], val.classes
    maps = np.stack([[truth for _, truth in views], predicted], axis=1)
    rows = [[view[0], *painted(m, len(classes))] for view, m in zip(views, maps)]
    title += f": image, truth, prediction; mIoU {log[-1]['mean_iou']:.3f}"
    save_picture(folder / "predictions.png", rows, np.unique(predicted), classes, title)
    print(f"{folder / 'curves.png'}\n{folder / 'predictions.png'}")


if __name__ == "__main__":
    sys.exit(model.exit_code(main))
