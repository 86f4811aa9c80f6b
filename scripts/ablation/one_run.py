"""Trains one run of the grid, or continues it; tests it, and writes its result.

Started by jobs.py as a process, `python -m ablation.one_run JSON`, with the settings of
the run. Training is train_segmentation.py's own, and the last checkpoint is the one
that is tested: no epoch is chosen by its score.
"""

import base64
import hashlib
import io
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import train_segmentation
from benchmarks import benchmarking
from mxnet import autograd
from mxnet.gluon import nn
from PIL import Image
from segmentation import checkpoint
from segmentation.config import Config
from segmentation.data import Batches, open_split
from segmentation.devices import open_contexts
from segmentation.engine import Engine
from segmentation.errors import Diverged, UserError, exit_code
from segmentation.files import write_json
from segmentation.models import build_model, parameters

from .results import rounded

SAMPLES = 4
OF_AN_EPOCH = (
    "epoch", "train_loss", "val_loss", "pixel_accuracy", "mean_iou", "learning_rate",
    "seconds",
)  # fmt: skip


def main():
    task, started = json.loads(sys.argv[1]), time.perf_counter()
    config = Config.from_dict(task["settings"])
    result = {**task["about"], "settings": task["compared"]}
    result["diverged"] = train(config)  # before any other net, for the same names
    train_set = open_split("train", config)
    result["train_images"] = len(train_set)
    result["initial"] = digest_of_initial_parameters(config, len(train_set.classes))
    state = former(config)
    if state:
        result["classes"] = state.classes
        result["epochs"] = [{k: entry[k] for k in OF_AN_EPOCH} for entry in state.log]
        result.update(tested(state, task["with_images"]))
    result["seconds"] = time.perf_counter() - started
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["machine"] = benchmarking.machine()
    write_json(task["result"], rounded(result))


def train(config):
    """Train what is left to train; None, or the sentence that says why it ended."""
    state = former(config)
    if state and state.epoch == config.epochs:
        return None
    try:
        train_segmentation.train(
            ["--resume", config.run_dir] if state else config.arguments()
        )
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


def digest_of_initial_parameters(config, num_classes):
    """A digest of the initial parameters, which all arms of a seed share."""
    contexts = open_contexts(config.ctx, config.num_devices)
    values = parameters(build_model(config, num_classes, contexts))
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode() + values[name].tobytes())
    return digest.hexdigest()[:16]


def tested(state, with_images):
    """Scores on the test split with running and with batch statistics; predictions.

    In training mode, without Dropout, layers normalize a batch as they do in training:
    of as many images on as many devices, together or each device by itself.
    """
    config, count = state.config, len(state.classes)
    contexts = open_contexts(config.ctx, config.num_devices)
    net = build_model(config, count, contexts, state.parameters)
    net.apply(without_dropout)
    test_set = open_split("test", config)
    batches = Batches(Shuffled(test_set), config, training=False)
    engine = Engine(net, contexts, config, batches.count, count)
    scores = {"running": scored(engine, batches)}
    views = [batches.view(0, index) for index in range(min(SAMPLES, len(test_set)))]
    predictions, _ = engine.predict(*batches.assemble(views))
    with autograd.train_mode():
        scores["batch"] = scored(engine, batches)
    found = {"test_images": len(test_set), "test": scores}
    found["predictions"] = [encoded(p.astype(np.uint8)) for p in predictions]
    if with_images:
        found["images_shown"] = [encoded(i, "jpeg", quality=90) for i, _ in views]
        found["truths_shown"] = [encoded(truth.astype(np.uint8)) for _, truth in views]
    return found


def scored(engine, batches):
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
        self._dataset = dataset
        self._order = np.random.default_rng(0).permutation(len(dataset))

    def __len__(self):
        return len(self._dataset)

    def load(self, index):
        return self._dataset.load(int(self._order[index]))


def without_dropout(block):
    if isinstance(block, nn.Dropout):
        block._rate = 0


def encoded(picture, kind="png", **options):
    """A uint8 array as the text of a picture; of labels, 255 is unlabelled."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, optimize=True, **options)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(exit_code(main))
