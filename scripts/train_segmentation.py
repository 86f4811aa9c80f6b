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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from segmentation.config import Config
from segmentation.errors import Parser, UserError, exit_code

SHOWN = 4  # images of the validation set in predictions.png


def arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    Config.add_arguments(parser)
    add = parser.add_argument
    add("--run-dir", metavar="RUN", help="default: runs/DATASET-MODEL-NORM")
    add("--resume", metavar="RUN", help="continue the run in a folder")
    add("--overwrite", action="store_true", help="replace the run in the folder")
    add("--stop-after", type=int, metavar="N", help="stop when N epochs are done")
    text = "in all processes of mpirun, which share --batch-size"
    add("--distributed", action="store_true", help=text)
    options = parser.parse_args()
    if options.resume and (options.run_dir or options.overwrite):
        raise UserError("--resume excludes --run-dir and --overwrite.")
    names = "run_dir", "resume", "overwrite", "stop_after", "distributed"
    return options, {k: v for k, v in vars(options).items() if k not in names}


def settings(options, given):
    """The run's folder, its settings, and the log of its epochs so far."""
    from segmentation import run_folder

    if options.resume:
        former, _, log = run_folder.load(options.resume)
        return Path(options.resume), former.resumed_with(given), log
    config = Config.from_dict(given)
    default = f"runs/{config.dataset}-{config.model}-{config.norm}"
    folder = Path(options.run_dir or default)
    if (folder / "log.json").exists() and not options.overwrite:
        raise UserError(
            f"The folder {folder} holds a run already: give another --run-dir, "
            "continue it with --resume or replace it with --overwrite."
        )
    return folder, config, []


def train():
    options, given = arguments()

    from segmentation import run_folder

    from gluon_syncbn import distributed

    if options.distributed:
        distributed.init()
    folder, config, log = settings(options, given)
    end = config.epochs if options.stop_after is None else options.stop_after
    if not len(log) < end <= config.epochs:
        raise UserError(
            f"Of the {config.epochs} epochs of the run in {folder} {len(log)} are "
            f"done, so it cannot be trained until epoch {end}."
        )
    with run_folder.held(folder):
        train_epochs(folder, config, log, end)


def train_epochs(folder, config, log, end):
    """Train until epoch `end`; rank 0 writes for all."""
    from segmentation import pictures, run_folder
    from segmentation.data import Batches, open_datasets
    from segmentation.engine import Engine

    from gluon_syncbn import distributed

    train_set, val_set = open_datasets(config)
    classes = train_set.classes
    batches = Batches(train_set, config, training=True)
    val_batches = Batches(val_set, config, training=False)
    engine = Engine(config, len(classes), batches.count)
    writes = distributed.rank() == 0
    title = (
        f"{config.model} on {config.dataset}, {config.norm}, {distributed.size()} x "
    )
    title += f"{config.num_devices} x {config.ctx}"
    count = len(val_set)
    rows = min(SHOWN, count)
    views = [val_batches.view(0, row * count // rows) for row in range(rows)]
    if log:
        run_folder.restore(engine.net, folder, len(log), engine.trainer)
    elif writes:
        run_folder.begin(folder, config, classes)
        pictures.save_image(folder / "sample.png", views[0][0])
    if writes:
        print(
            f"{title}: {len(train_set)} images, {len(classes)} classes, "
            f"{batches.count} steps an epoch; run folder {folder}"
        )
    for epoch in range(len(log), end):
        started = time.perf_counter()
        loss = engine.train_epoch(batches, epoch)
        val_loss, confusion = engine.evaluate(val_batches)
        entry = {
            "epoch": epoch + 1,
            "train_loss": loss,
            "val_loss": val_loss,
            "pixel_accuracy": confusion.pixel_accuracy(),
            "mean_iou": confusion.mean_iou(),
            "seconds": time.perf_counter() - started,
        }
        log.append(entry)
        if writes:
            run_folder.save(folder, engine, log)
            print(
                "epoch {epoch}: loss {train_loss:.4f}, validation loss {val_loss:.4f}, "
                "pixel accuracy {pixel_accuracy:.3f}, mIoU {mean_iou:.3f}, "
                "{seconds:.1f} s".format(**entry),
                flush=True,
            )
    if writes:
        pictures.save_curves(folder / "curves.png", log, title)
        prediction, _ = engine.predict(*val_batches.assemble(views))
        samples = [(image, truth, p) for (image, truth), p in zip(views, prediction)]
        title += f": epoch {end}, mIoU {log[-1]['mean_iou']:.3f}"
        pictures.save_predictions(folder / "predictions.png", samples, classes, title)
        for name in "curves.png", "predictions.png":
            print(folder / name)


if __name__ == "__main__":
    sys.exit(exit_code(train))
