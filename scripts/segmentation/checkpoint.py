"""Checkpoints: one .npz file each, with settings, parameters and optimizer state.

A file may come from anywhere, so `load` checks all of it against one schema; what it
returns needs no further check, but for whether it fits the net. No pickle: a file
cannot run code.
"""

import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import archive
from .checks import is_kind, shown
from .config import Config
from .errors import UserError
from .files import open_regular, write_atomically

FORMAT = "gluon_syncbn segmentation checkpoint 1"
_MAX_CLASSES = 4096
_PARTS = ["classes", "config", "epoch", "format", "log"]
_MOMENTUM = re.compile(r"momentum:(0|[1-9][0-9]{0,8})")
_LOSSES = "train_loss", "val_loss"  # a diverging one may be infinite
_SHARES = "pixel_accuracy", "mean_iou"
_AMOUNTS = "images", "learning_rate", "seconds"


@dataclass
class Checkpoint:
    config: Config
    classes: tuple
    epoch: int  # epochs done
    log: list  # one dict per epoch
    parameters: dict
    momenta: dict = field(default_factory=dict)


def save(path, checkpoint):
    meta = {
        "format": FORMAT,
        "config": checkpoint.config.to_dict(),
        "classes": list(checkpoint.classes),
        "epoch": checkpoint.epoch,
        "log": checkpoint.log,
    }
    arrays = {f"parameter:{name}": v for name, v in checkpoint.parameters.items()}
    arrays.update({f"momentum:{index}": v for index, v in checkpoint.momenta.items()})
    arrays["meta"] = np.array(json.dumps(meta))
    buffer = io.BytesIO()  # writing straight to a full disk fails twice, in zipfile too
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getbuffer())


def path_of(source, name="last.npz"):
    """The checkpoint that is meant; a run folder stands for the one of this name."""
    try:
        source = Path(source)
        return source / name if source.is_dir() else source
    except (OSError, ValueError) as error:
        raise UserError(f"There is no checkpoint {source}: {error}.") from None


def load(source):
    """The checkpoint in a file or run folder.

    Raises
    ------
    UserError
        If the file is not there, is not whole, or violates the schema.
    """
    path = path_of(source)
    try:
        with open_regular(path, "checkpoint") as file:
            arrays = archive.read(file)
        meta = json.loads(arrays.pop("meta").item())
        if meta["format"] != FORMAT:
            raise archive.Damaged(f"its format is {shown(meta['format'])}")
    except archive.Damaged as error:
        reason = f": {error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = ": its part 'meta' cannot be read"
    else:
        try:
            return _checked(meta, arrays)
        except UserError as error:
            raise UserError(f"The checkpoint {path} is wrong: {error}") from None
    raise UserError(
        f"The file {path} is not a whole checkpoint of train_segmentation.py{reason}."
    )


def _checked(meta, arrays):
    _need("the list of its parts", sorted(meta), sorted(meta) == _PARTS, _PARTS)
    classes, epoch, log = meta["classes"], meta["epoch"], meta["log"]
    _need(
        "'classes'", classes,
        is_kind(classes, list) and 2 <= len(classes) <= _MAX_CLASSES
        and all(is_kind(name, str) and name and name.isprintable() for name in classes),
        f"a list of 2 to {_MAX_CLASSES} printable names",
    )  # fmt: skip
    config = Config.from_dict(meta["config"])
    missing = sorted(set(config.to_dict()) - set(meta["config"]))
    _need("the list of missing settings", missing, not missing, "empty")
    _need(
        "'epoch'", epoch, is_kind(epoch, int) and 1 <= epoch <= config.epochs,
        f"a whole number from 1 to the {config.epochs} of its settings",
    )  # fmt: skip
    _need(
        "'log'", log, is_kind(log, list) and len(log) == epoch,
        f"a list of {epoch} entries, one for each epoch",
    )  # fmt: skip
    for number, entry in enumerate(log, 1):
        _check_entry(entry, number, len(classes))
    for name, array in arrays.items():
        _need(
            f"the type of the array {shown(name)}", str(array.dtype),
            array.dtype in ("float32", "float64", "float16"), "float16, 32 or 64",
        )  # fmt: skip
    momenta = {k: v for k, v in arrays.items() if _MOMENTUM.fullmatch(k)}
    parameters = {k: arrays[k] for k in arrays if k.startswith("parameter:")}
    others = sorted(set(arrays) - set(momenta) - set(parameters))
    _need(
        "the name of an array", others and others[0], not others,
        "'parameter:NAME' or 'momentum:INDEX'",
    )  # fmt: skip
    parameters = {k.split(":", 1)[1]: v for k, v in parameters.items()}
    momenta = {int(k.split(":")[1]): v for k, v in momenta.items()}
    return Checkpoint(config, tuple(classes), epoch, log, parameters, momenta)


def _check_entry(entry, number, num_classes):
    keys = {"epoch", "class_iou", "waits", *_LOSSES, *_SHARES, *_AMOUNTS}
    _need(
        f"entry {number} of 'log'", entry,
        is_kind(entry, dict) and set(entry) == keys, f"a table of {sorted(keys)}",
    )  # fmt: skip
    iou, waits = entry["class_iou"], entry["waits"]
    rules = {
        "epoch": (is_kind(entry["epoch"], int) and entry["epoch"] == number, number),
        "class_iou": (
            is_kind(iou, list) and len(iou) == num_classes
            and all(value is None or _is_within(value, 1) for value in iou),
            f"a list of {num_classes} numbers from 0 to 1",
        ),
        "waits": (
            is_kind(waits, dict) and len(waits) == 3
            and all(_is_within(value, 1e15) for value in waits.values()),
            "a table of 3 numbers",
        ),
    }  # fmt: skip
    rules.update({k: (isinstance(entry[k], float), "a number") for k in _LOSSES})
    rules.update({k: (_is_within(entry[k], 1), "from 0 to 1") for k in _SHARES})
    rules.update({k: (_is_within(entry[k], 1e15), "from 0 to 1e15") for k in _AMOUNTS})
    for key, (holds, wanted) in rules.items():
        _need(f"{key!r} of entry {number} of 'log'", entry[key], holds, wanted)


def _is_within(value, most):
    return is_kind(value, float) and 0 <= value <= most


def _need(what, value, holds, wanted):
    if not holds:
        raise UserError(f"{what} is {shown(value)}, but must be {wanted}.")
