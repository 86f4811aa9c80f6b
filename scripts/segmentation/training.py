"""A training run: epochs, their log and checkpoints, and the pictures at the end.

Called by train_segmentation.py, which holds the run folder's lock.
"""

import random
import time
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

import gluon_syncbn
from gluon_syncbn import distributed

from . import checkpoint, interrupts, report
from .data import Batches, open_datasets
from .devices import open_contexts
from .engine import Engine
from .errors import Diverged, UserError
from .files import replacing, write_json
from .models import build_model, parameters

PANEL_ROWS = 4
WAITS = "data", "each_other"  # of gluon_syncbn.Monitor


def run(config, former, stop_after):
    """Train from the beginning, or from the checkpoint `former`."""
    contexts = open_contexts(config.ctx, config.num_devices)
    random.seed(config.seed)
    np.random.seed(config.seed)
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
    this = Run(engine, batches, val_batches, classes, former.log if former else [])
    if this.writes:
        this.prepare_folder()
        print(
            f"{config.model} on {len(train_set)} images, {len(classes)} classes, "
            f"{config.norm} on {distributed.size()} x {config.num_devices} x "
            f"{config.ctx}, {batches.count} steps an epoch; run folder {this.folder}"
        )
    end = min(config.epochs, stop_after or config.epochs)
    with gluon_syncbn.Monitor(engine.net, engine.trainer) as monitor:
        for epoch in range(len(this.log), end):
            waits = this.epoch(epoch, monitor)
    if this.writes:
        print(f"In the last epoch, devices {waits}: {waits.hint}.")
        this.finish()


class Run:
    """An engine with its data, its log and its folder; rank 0 writes for all."""

    def __init__(self, engine, batches, val_batches, classes, log):
        self.engine, self.config = engine, engine.config
        self.batches, self.val_batches = batches, val_batches
        self.classes, self.log = classes, list(log)
        self.folder = Path(self.config.run_dir)
        self.writes = distributed.rank() == 0

    def epoch(self, epoch, monitor):
        """Train, evaluate, log and save; return what devices have waited for."""
        started = time.perf_counter()
        monitor.report()
        loss, images = self.train_epoch(monitor, epoch)
        waits = monitor.report()
        val_loss, confusion = self.engine.evaluate(self.val_batches.epoch(0))
        best = max((entry["mean_iou"] for entry in self.log), default=-1.0)
        self.log.append(
            {
                "epoch": epoch + 1,
                "images": images,
                "train_loss": loss,
                "val_loss": val_loss,
                "pixel_accuracy": confusion.pixel_accuracy(),
                "mean_iou": confusion.mean_iou(),
                "class_iou": [None if v != v else v for v in confusion.class_iou()],
                "learning_rate": self.engine.trainer.learning_rate,
                "seconds": time.perf_counter() - started,
                "waits": {key: getattr(waits, key) for key in WAITS},
            }
        )
        if self.writes:
            self.save(is_best=self.log[-1]["mean_iou"] > best)
        return waits

    def train_epoch(self, monitor, epoch):
        """One pass over the training set; the mean loss of its images, their number."""
        self.engine.seed_epoch(epoch)
        total, images, count = 0.0, 0, self.batches.count
        title = f"epoch {epoch + 1}/{self.config.epochs}"
        shown = {"leave": False, "disable": None}
        bar = tqdm(monitor.data(self.batches.epoch(epoch)), title, count, **shown)
        for index, (x, y) in enumerate(bar):
            loss = self.engine.step(x, y, epoch * count + index)
            interrupts.check()
            if loss != loss:
                raise Diverged(
                    f"The loss is not a number in epoch {epoch + 1}: try a smaller "
                    "--lr; the checkpoint of the epoch before is kept."
                )
            rows = int(distributed.allreduce(len(x)))
            total, images = total + loss * rows, images + rows
            bar.set_postfix(loss=f"{total / images:.3f}")
        self.engine.settle()
        return total / images, images

    def save(self, is_best):
        values, momenta = parameters(self.engine.net), self.engine.momenta()
        state = checkpoint.Checkpoint(
            self.config, self.classes, len(self.log), self.log, values, momenta
        )
        for name in ("best.npz", "last.npz") if is_best else ("last.npz",):
            checkpoint.save(self.folder / name, state)
        write_json(self.folder / "log.json", self.log)
        print(
            "epoch {epoch}: loss {train_loss:.4f}, validation loss {val_loss:.4f}, "
            "pixel accuracy {pixel_accuracy:.3f}, mIoU {mean_iou:.3f}, "
            "{seconds:.1f} s".format(**self.log[-1]),
            flush=True,
        )

    def prepare_folder(self):
        """Write the settings, and a few images for predict.py."""
        write_json(self.folder / "config.json", self.config.to_dict())
        for row, (image, _) in enumerate(self.shown_views()):
            with replacing(self.folder / f"sample_{row}.png") as file:
                Image.fromarray(image).save(file, "png")

    def shown_views(self):
        """A few images with their labels, spread over the validation set."""
        count = self.val_batches.images
        rows = min(PANEL_ROWS, count)
        return [self.val_batches.view(0, row * count // rows) for row in range(rows)]

    def finish(self):
        """Draw the curves and a panel of a few validation images; print the table."""
        config, views, last = self.config, self.shown_views(), self.log[-1]
        heading = (
            f"{config.model} on {config.dataset}, {config.norm}, "
            f"{config.num_devices} x {config.ctx}"
        )
        report.save_curves(self.folder / "curves.png", self.log, heading)
        prediction, _ = self.engine.predict(*self.val_batches.assemble(views))
        samples = [(image, truth, p) for (image, truth), p in zip(views, prediction)]
        heading += f": epoch {last['epoch']}, mIoU {last['mean_iou']:.3f}"
        report.save_panel(self.folder / "panel.png", samples, self.classes, heading)
        print("\n" + report.table(self.log) + "\n")
        for name in "curves.png", "panel.png", "best.npz":
            print(self.folder / name)
