#!/usr/bin/env python3
"""Train a GluonCV segmentation model with synchronized batch norm on several devices.

    python scripts/train_segmentation.py                # digits, two CPU contexts
    python scripts/train_segmentation.py --dataset voc --data-root DIR --crop-size 480
    python scripts/train_segmentation.py --resume runs/digits-fastscnn-syncbn

The run folder receives config.json, log.json, curves.png, panel.png, sample_*.png and
the checkpoints last.npz and best.npz.
"""

import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from segmentation.config import Config  # noqa: E402
from segmentation.errors import Parser, UserError, exit_code  # noqa: E402

PANEL_ROWS = 4
WAITS = "data", "each_other", "gradients"  # of gluon_syncbn.Monitor


def arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    Config.add_arguments(parser)
    parser.add_argument(
        "--resume", metavar="RUN", help="continue this run folder or checkpoint exactly"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the run that is in the folder"
    )
    parser.add_argument(
        "--stop-after", type=int, metavar="N",
        help="stop when N epochs are done, as if interrupted; --resume continues",
    )  # fmt: skip
    parser.add_argument(
        "--distributed", action="store_true",
        help="train in all processes that mpirun has started: --batch-size is over "
        "all of them, --num-devices of each",
    )  # fmt: skip
    options = vars(parser.parse_args())
    names = "resume", "overwrite", "stop_after", "distributed"
    return [options.pop(name) for name in names] + [options]


def settings(resume, overwrite, stop_after, given):
    """The settings of the run, and the checkpoint to continue from or None."""
    from segmentation import checkpoint

    if stop_after is not None and stop_after < 1:
        raise UserError(f"--stop-after is {stop_after}, but must be at least 1.")
    if resume:
        if overwrite:
            raise UserError("--overwrite and --resume exclude each other.")
        former = checkpoint.load(resume)
        folder = Path(resume) if Path(resume).is_dir() else Path(resume).parent
        config = former.config.resumed_with({"run_dir": str(folder), **given})
        if former.epoch >= config.epochs:
            raise UserError(
                f"The run in {resume} has done all its {config.epochs} epochs."
            )
        if stop_after is not None and former.epoch >= stop_after:
            raise UserError(
                f"--stop-after is {stop_after}, but the run in {resume} has done "
                f"{former.epoch} epochs."
            )
        return config, former
    config = Config.from_dict(given)
    if (Path(config.run_dir) / "last.npz").exists() and not overwrite:
        raise UserError(
            f"The folder {config.run_dir} holds a run already: give another --run-dir, "
            "continue it with --resume or replace it with --overwrite."
        )
    return config, None


def train():
    resume, overwrite, stop_after, is_distributed, given = arguments()
    config, former = settings(resume, overwrite, stop_after, given)

    import mxnet as mx
    import numpy as np
    from segmentation import interrupts
    from segmentation.data import Batches, open_datasets
    from segmentation.devices import open_contexts
    from segmentation.engine import Engine
    from segmentation.models import build_model

    import gluon_syncbn
    from gluon_syncbn import distributed

    if is_distributed:
        distributed.init()
    writes = distributed.rank() == 0
    contexts = open_contexts(config.ctx, config.num_devices)
    random.seed(config.seed)
    np.random.seed(config.seed)
    mx.random.seed(config.seed)
    train_set, val_set = open_datasets(config)
    classes = train_set.classes
    if former and former.classes != classes:
        raise UserError(
            f"The checkpoint knows {len(former.classes)} classes, which are not the "
            f"{len(classes)} of the data set: a resumed run needs the same classes."
        )
    batches = Batches(train_set, config, training=True)
    val_batches = Batches(val_set, config, training=False)
    net = build_model(config, len(classes), contexts, former and former.parameters)
    interrupts.install()
    engine = Engine(net, contexts, config, batches.count, len(classes))
    if former:
        engine.set_momenta(former.momenta)
    folder = writes and prepare_folder(config, val_batches, len(val_set))
    if writes:
        print(
            f"{config.model} on {len(train_set)} images, {len(classes)} classes, "
            f"{config.norm} on {distributed.size()} x {config.num_devices} x "
            f"{config.ctx}, {batches.count} steps an epoch; run folder {folder}"
        )
    with gluon_syncbn.Monitor(engine.net, engine.trainer) as monitor:
        log = run_epochs(
            engine, monitor, batches, val_batches, folder, former, stop_after, classes
        )
    if writes:
        draw(engine, val_batches, len(val_set), folder, log, classes)
        finish(folder, log)


def run_epochs(
    engine, monitor, batches, val_batches, folder, former, stop_after, classes
):
    """Train, evaluate and save epoch by epoch; return the log of all of them."""
    from segmentation import checkpoint
    from segmentation.models import parameters

    config = engine.config
    log, first = (list(former.log), former.epoch) if former else ([], 0)
    best = max((entry["mean_iou"] for entry in log), default=-1.0)
    for epoch in range(first, min(config.epochs, stop_after or config.epochs)):
        started = time.perf_counter()
        monitor.report()
        loss, images = train_epoch(engine, monitor, batches, epoch)
        waits = monitor.report()
        val_loss, confusion = engine.evaluate(val_batches.epoch(0))
        log.append(
            {
                "epoch": epoch + 1,
                "images": images,
                "train_loss": loss,
                "val_loss": val_loss,
                "pixel_accuracy": confusion.pixel_accuracy(),
                "mean_iou": confusion.mean_iou(),
                "class_iou": [None if v != v else v for v in confusion.class_iou()],
                "learning_rate": engine.trainer.learning_rate,
                "seconds": time.perf_counter() - started,
                "waits": {key: getattr(waits, key) for key in WAITS},
            }
        )
        if not folder:
            continue  # rank 0 writes for all processes
        state = checkpoint.Checkpoint(
            config, classes, epoch + 1, log, parameters(engine.net), engine.momenta()
        )
        if log[-1]["mean_iou"] > best:
            best = log[-1]["mean_iou"]
            checkpoint.save(folder / "best.npz", state)
        checkpoint.save(folder / "last.npz", state)
        checkpoint.write_json(folder / "log.json", log)
        print(
            "epoch {epoch}: loss {train_loss:.4f}, validation loss {val_loss:.4f}, "
            "pixel accuracy {pixel_accuracy:.3f}, mIoU {mean_iou:.3f}, "
            "{seconds:.1f} s".format(**log[-1]),
            flush=True,
        )
    print(f"In the last epoch, devices {waits}: {waits.hint}.")
    return log


def train_epoch(engine, monitor, batches, epoch):
    """One pass over the training set; the mean loss of its images and their number."""
    from segmentation import interrupts
    from tqdm import tqdm

    from gluon_syncbn import distributed

    engine.seed_epoch(epoch)
    total, images = 0.0, 0
    title = f"epoch {epoch + 1}/{engine.config.epochs}"
    shown = {"leave": False, "disable": None}
    bar = tqdm(monitor.data(batches.epoch(epoch)), title, batches.count, **shown)
    for index, (x, y) in enumerate(bar):
        loss = engine.step(x, y, epoch * batches.count + index)
        interrupts.check()
        if loss != loss:
            raise UserError(
                f"The loss is not a number in epoch {epoch + 1}: try a smaller --lr; "
                "the checkpoint of the epoch before is kept."
            )
        rows = int(distributed.allreduce(len(x)))
        total, images = total + loss * rows, images + rows
        bar.set_postfix(loss=f"{total / images:.3f}")
    engine.settle()
    return total / images, images


def prepare_folder(config, val_batches, val_count):
    """Make the run folder, with the settings and a few images for predict.py."""
    from PIL import Image
    from segmentation.checkpoint import write_json

    folder = Path(config.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config.to_dict())
        for row, index in enumerate(shown_images(val_count)):
            image, _ = val_batches.view(0, index)
            Image.fromarray(image).save(folder / f"sample_{row}.png")
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error}."
        ) from None
    return folder


def shown_images(count):
    """Indices of a few images spread over a set of `count`."""
    rows = min(PANEL_ROWS, count)
    return [row * count // rows for row in range(rows)]


def draw(engine, val_batches, val_count, folder, log, classes):
    """The curves, and a panel of a few validation images."""
    from segmentation import report

    config = engine.config
    heading = (
        f"{config.model} on {config.dataset}, {config.norm}, "
        f"{config.num_devices} x {config.ctx}"
    )
    report.save_curves(folder / "curves.png", log, heading)
    views = [val_batches.view(0, index) for index in shown_images(val_count)]
    prediction, _ = engine.predict(*val_batches.assemble(views))
    samples = [(image, truth, p) for (image, truth), p in zip(views, prediction)]
    heading += f": epoch {log[-1]['epoch']}, mIoU {log[-1]['mean_iou']:.3f}"
    report.save_panel(folder / "panel.png", samples, classes, heading)


def finish(folder, log):
    from segmentation.report import table

    print("\n" + table(log) + "\n")
    names = {
        "curves.png": "curves",
        "panel.png": "panel",
        "best.npz": "best checkpoint",
    }
    for name, what in names.items():
        print(f"{what + ':':17s}{folder / name}")


if __name__ == "__main__":
    sys.exit(exit_code(train))
