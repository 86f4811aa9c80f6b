#!/usr/bin/env python3
"""Train a GluonCV segmentation model with synchronized batch norm on several devices.

    python scripts/train_segmentation.py                # digits, two CPU contexts
    python scripts/train_segmentation.py --dataset voc --data-root DIR --crop-size 480
    python scripts/train_segmentation.py --resume runs/digits-fastscnn-syncbn

The run folder receives settings.json, log.json, curves.png, predictions.png, sample.png
and the parameters and optimizer states of its last and its best epoch.
"""

import sys
import time
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from gluon_syncbn import distributed

from segmentation import pictures, run_folder
from segmentation.config import Config
from segmentation.data import Batches, open_datasets
from segmentation.engine import Engine
from segmentation.errors import Parser, UserError, exit_code


def arguments():
    """The options of this script, and the settings of a run among them."""
    parser = Parser(description=__doc__.splitlines()[0])
    Config.add_arguments(parser)
    add = parser.add_argument
    add("--run-dir", type=Path, help="default: runs/DATASET-MODEL-NORM")
    add("--resume", type=Path, metavar="RUN_DIR", help="continue the run in a folder")
    add("--overwrite", action="store_true", help="replace the run in the folder")
    add("--stop-after", type=int, metavar="N", help="stop when N epochs are done")
    text = "in all processes of mpirun, which share --batch-size"
    add("--distributed", action="store_true", help=text)
    options = parser.parse_args()
    if options.resume and (options.run_dir or options.overwrite):
        raise UserError("--resume excludes --run-dir and --overwrite.")
    return options, {k: v for k, v in vars(options).items() if hasattr(Config, k)}


def settings(options, given):
    """The run's folder, its settings, and the log of its epochs so far."""
    if options.resume:
        former, _, log = run_folder.load(options.resume)
        return options.resume, former.resumed_with(given), log
    config = Config.from_dict(given)
    default = Path("runs", f"{config.dataset}-{config.model}-{config.norm}")
    folder = options.run_dir or default
    if (folder / "log.json").exists() and not options.overwrite:
        raise UserError(
            f"The folder {folder} holds a run already: give another --run-dir, "
            "continue it with --resume or replace it with --overwrite."
        )
    return folder, config, []


def main():
    options, given = arguments()
    if options.distributed:
        distributed.init()
    folder, config, log = settings(options, given)
    end = config.epochs if options.stop_after is None else options.stop_after
    if not len(log) < end <= config.epochs:
        raise UserError(
            f"The run in {folder} has done {len(log)} of its {config.epochs} epochs, "
            f"so it cannot stop after epoch {end}."
        )
    with run_folder.held(folder):
        train(folder, config, log, end)


def train(folder, config, log, end):
    """Train until epoch `end`; rank 0 writes for all."""
    train_set, val_set = open_datasets(config)
    classes = train_set.classes
    batches = Batches(train_set, config, training=True)
    val_batches = Batches(val_set, config, training=False)
    shown = range(0, len(val_set), -(-len(val_set) // 4))
    views = [val_batches.view(0, index) for index in shown]
    engine = Engine(config, len(classes), batches.count)
    writes = distributed.rank() == 0
    title = f"{config.model}, {config.dataset}, {config.norm}"
    if log:
        run_folder.restore(engine.net, folder, len(log), engine.trainer)
    if writes:
        print(f"{title}: {len(train_set)} images; run folder {folder}")
    for epoch in range(len(log) + 1, end + 1):
        started = time.perf_counter()
        entry = {"epoch": epoch, "train_loss": engine.train_epoch(batches, epoch - 1)}
        entry["val_loss"], confusion = engine.evaluate(val_batches)
        entry["pixel_accuracy"] = confusion.pixel_accuracy()
        entry["mean_iou"] = confusion.mean_iou()
        entry["seconds"] = time.perf_counter() - started
        log.append(entry)
        if writes:
            run_folder.save(folder, engine, classes, log)
            print(
                "epoch {epoch}: loss {train_loss:.4f}, validation loss {val_loss:.4f}, "
                "pixel accuracy {pixel_accuracy:.3f}, mIoU {mean_iou:.3f}, "
                "{seconds:.1f} s".format(**entry),
                flush=True,
            )
    if writes:
        pictures.save_curves(folder / "curves.png", log, title)
        predictions, _ = engine.predict(*val_batches.assemble(views))
        rows = [(*view, prediction) for view, prediction in zip(views, predictions)]
        title += f": epoch {end}, mIoU {entry['mean_iou']:.3f}"
        pictures.save_predictions(folder / "predictions.png", rows, classes, title)
        Image.fromarray(views[0][0]).save(folder / "sample.png")
        print(f"{folder / 'curves.png'}\n{folder / 'predictions.png'}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
