"""Checkpoints: one .npz file each, with settings, parameters and optimizer state.

A file is written beside its place and moved there when it is whole and on the disk, so
that an interrupted run leaves the former one. No pickle: a file cannot run code.
"""

import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .config import Config
from .errors import UserError

FORMAT = "gluon_syncbn segmentation checkpoint 1"


@dataclass
class Checkpoint:
    config: Config
    classes: tuple
    epoch: int  # epochs done
    log: list  # one dict per epoch
    parameters: dict
    momenta: dict = field(default_factory=dict)


def write_atomically(path, write):
    """Call `write(file)` on a new binary file that then takes the place of `path`."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"The file {path} cannot be written: {error}.") from None
    finally:
        if temporary.is_file():
            temporary.unlink()


def write_json(path, value):
    text = json.dumps(value, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


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
    write_atomically(path, lambda file: np.savez(file, **arrays))


def load(path):
    """The checkpoint in a file; a run folder stands for its last.npz."""
    path = Path(path)
    path = path / "last.npz" if path.is_dir() else path
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
        if meta["format"] != FORMAT:
            raise KeyError
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint {path}.") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise UserError(
            f"The file {path} is not a whole checkpoint of train_segmentation.py."
        ) from None
    return Checkpoint(
        config=Config.from_dict(meta["config"]),
        classes=tuple(meta["classes"]),
        epoch=meta["epoch"],
        log=meta["log"],
        parameters=_with_prefix(arrays, "parameter:"),
        momenta={int(k): v for k, v in _with_prefix(arrays, "momentum:").items()},
    )


def _with_prefix(arrays, prefix):
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
