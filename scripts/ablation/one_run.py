"""Trains one run of the grid, or continues it; tests it, and writes its result.

Started by jobs.py as a process, `python -m ablation.one_run JSON`. Training is that of
train_segmentation.py, and the last checkpoint is the one that is tested: no epoch is
chosen by its score.
"""

import base64
import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from mxnet import autograd
from PIL import Image
from segmentation import checkpoint, folder_lock, training
from segmentation.data import open_split
from segmentation.errors import Diverged, UserError, exit_code

from gluon_syncbn import recompute_statistics

from .process import make_engine, read_task, write_result

SAMPLES = 4
RECOMPUTED_FROM = 16  # images in a batch, whatever the run's own
OF_AN_EPOCH = (
    "epoch", "train_loss", "val_loss", "pixel_accuracy", "mean_iou", "learning_rate",
    "seconds",
)  # fmt: skip


def main():
    task, config = read_task()
    result = {"diverged": train(config)}
    result["train_images"] = len(open_split("train", config))
    state = former(config)
    if state:
        result["classes"] = state.classes
        result["epochs"] = [{k: entry[k] for k in OF_AN_EPOCH} for entry in state.log]
        result.update(tested(state, task["with_images"]))
    write_result(task, **result)


def train(config):
    """Train what is left to train; None, or the sentence that says why it ended."""
    state = former(config)
    if state and state.epoch == config.epochs:
        return None
    try:
        with folder_lock.held(config.run_dir):
            training.run(config, state, stop_after=None)
    except Diverged as error:
        return str(error)
    return None


def former(config):
    """The last checkpoint of this run, or None."""
    path = Path(config.run_dir) / "last.npz"
    if not path.exists():
        return None
    state = checkpoint.load(path)
    if state.config != config:
        raise UserError(
            f"The folder {config.run_dir} holds a run of other settings: give another "
            "--runs, or remove it."
        )
    return state


def tested(state, with_images):
    """Scores on the test split with each kind of statistics; predictions.

    In training mode layers normalize a batch as they do in training: of as many images
    on as many devices, together or each device by itself.
    """
    test_set = Shuffled(open_split("test", state.config))
    engine, batches = make_engine(state.config, test_set, False, state.parameters)
    views = [batches.view(0, k) for k in range(min(SAMPLES, len(test_set)))]
    predictions, _ = engine.predict(*batches.assemble(views))
    found = {"test_images": len(test_set), "test": scores(engine, batches)}
    found["test"]["recomputed"] = recomputed(state, batches)
    found["predictions"] = [encoded(p.astype(np.uint8)) for p in predictions]
    if with_images:
        found["images_shown"] = [encoded(i, "jpeg", quality=90) for i, _ in views]
        found["truths_shown"] = [encoded(truth.astype(np.uint8)) for _, truth in views]
    return found


def scores(engine, batches):
    """Of inference, with running statistics, and with those of each batch."""
    found = {"running": _scored(engine, batches)}
    with autograd.train_mode():
        found["batch"] = _scored(engine, batches)
    return found


def recomputed(state, test_batches):
    """The score with statistics of all training images, in batches of one device.

    The images are augmented as those of one more epoch.
    """
    config = replace(state.config, num_devices=1, batch_size=RECOMPUTED_FROM)
    train_set = open_split("train", config)
    engine, batches = make_engine(config, train_set, weights=state.parameters)
    images = (x for x, _ in batches.epoch(config.epochs))
    recompute_statistics(engine.net, images)
    return _scored(engine, test_batches)


def _scored(engine, batches):
    loss, confusion = engine.evaluate(batches.epoch(0))
    return {
        "loss": loss,
        "pixel_accuracy": confusion.pixel_accuracy(),
        "mean_iou": confusion.mean_iou(),
        "class_iou": list(confusion.class_iou()),
    }


class Shuffled:
    """A data set in another order, always the same.

    In a folder neighbours are of one film; a batch of them would have statistics that
    no training batch has.
    """

    def __init__(self, dataset):
        self._dataset, self.classes = dataset, dataset.classes
        self._order = np.random.default_rng(0).permutation(len(dataset))

    def __len__(self):
        return len(self._dataset)

    def load(self, index):
        return self._dataset.load(int(self._order[index]))


def encoded(picture, kind="png", **options):
    """A uint8 array as the text of a picture; of labels, 255 is unlabelled."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, optimize=True, **options)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(exit_code(main))
