"""The folder of a run: settings, the epochs' parameters and optimizer states, the log.

Called by the scripts. An epoch's files are written under names of their own, and count
from the moment when `log.json` is replaced: a run is there whole or not at all.
"""

import contextlib
import json
import os
import pickle
from pathlib import Path

import mxnet as mx
from filelock import FileLock, Timeout

from gluon_syncbn import distributed

from .config import Config
from .errors import UserError


@contextlib.contextmanager
def held(folder):
    """Make the folder if need be, and keep other processes out of it.

    Of the ranks of a run, rank 0 writes and has the lock; all of them are refused.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    is_free = True
    with contextlib.ExitStack() as stack:
        if distributed.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock)
            except Timeout:
                is_free = False
        if not distributed.broadcast(is_free):
            raise UserError(
                f"The run folder {folder} is in use by another process: wait for its "
                "end, or give another --run-dir."
            )
        yield


def write_json(path, value):
    """Write a file that is whole or not there."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def begin(folder, config, classes):
    """Write the settings, after what is there of another run is removed."""
    for path in [folder / "log.json", *folder.glob("epoch-*")]:
        path.unlink(missing_ok=True)
    settings = {"settings": config.to_dict(), "classes": classes}
    write_json(folder / "settings.json", settings)


def save(folder, engine, log):
    """Save the last epoch of `log`; of the others only the best is kept."""
    epoch = len(log)
    engine.net.save_parameters(parameters_of(folder, epoch))
    engine.trainer.save_states(states_of(folder, epoch))
    write_json(folder / "log.json", log)
    kept = epoch, best_epoch(log)
    for path in folder.glob("epoch-*"):
        if int(path.stem[len("epoch-") :]) not in kept:
            path.unlink()


def load(folder):
    """The settings, the class names and the log of a run."""
    folder = Path(folder)
    try:
        found = json.loads((folder / "settings.json").read_text())
        log = json.loads((folder / "log.json").read_text())
        return Config.from_dict(found["settings"]), found["classes"], log
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"The folder {folder} holds no run of train_segmentation.py with an epoch "
            "that is done."
        ) from None


def restore(net, folder, epoch, trainer=None):
    """Load the parameters of an epoch, and the states for a trainer that continues."""
    try:
        net.load_parameters(parameters_of(folder, epoch))
        if trainer:
            trainer.load_states(states_of(folder, epoch))
    except (
        AssertionError, EOFError, ValueError, mx.MXNetError, pickle.UnpicklingError,
    ):  # fmt: skip
        raise UserError(
            f"The files of epoch {epoch} in {folder} are damaged, or of another net "
            "than its settings describe."
        ) from None


def best_epoch(log):
    """The number of the epoch with the best mean IoU."""
    return max(log, key=lambda entry: entry["mean_iou"])["epoch"]


def parameters_of(folder, epoch):
    return str(folder / f"epoch-{epoch:04d}.params")


def states_of(folder, epoch):
    return str(folder / f"epoch-{epoch:04d}.states")
