"""Checkpoints: one .npz file each, with settings, parameters and optimizer state.

Called by the scripts. A file holds no pickle, so it cannot run code. Whether it fits a
net is seen where the net takes its arrays.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .config import Config
from .errors import UserError
from .files import replacing

FORMAT = "gluon_syncbn segmentation checkpoint 1"


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
    with replacing(path) as file:
        np.savez(file, meta=np.array(json.dumps(meta)), **arrays)


def path_of(source, name="last.npz"):
    """The checkpoint that is meant; a run folder stands for the one of this name."""
    source = Path(source)
    return source / name if source.is_dir() else source


def load(source):
    """The checkpoint in a file or run folder; UserError if the file holds none."""
    path = path_of(source)
    if not path.is_file():
        raise UserError(f"There is no checkpoint {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _from_arrays(arrays)
    except UserError as error:
        raise UserError(f"The checkpoint {path} is wrong: {error}") from None
    except Exception as error:  # NumPy, zipfile and JSON have many for a damaged file
        raise UserError(
            f"The file {path} is not a whole checkpoint of train_segmentation.py: "
            f"{type(error).__name__}, {error}."
        ) from None


def _from_arrays(arrays):
    meta = json.loads(arrays.pop("meta").item())
    if meta["format"] != FORMAT:
        raise UserError(f"its format is {meta['format']!r}, expected {FORMAT!r}.")
    parts = {"parameter": {}, "momentum": {}}
    for name, array in arrays.items():
        kind, _, key = name.partition(":")
        parts[kind][key] = array
    return Checkpoint(
        Config.from_dict(meta["config"]),
        tuple(meta["classes"]),
        meta["epoch"],
        meta["log"],
        parts["parameter"],
        {int(index): array for index, array in parts["momentum"].items()},
    )
