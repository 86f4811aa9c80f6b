"""Checkpoints for tests: a small valid one, and files with any part of it changed.

Called by test_checkpoints.py and test_scripts.py.
"""

import io
import json
import zipfile

import numpy as np
from segmentation import checkpoint
from segmentation.config import Config

ENTRY = {
    "epoch": 1, "images": 600, "train_loss": 2.5, "val_loss": float("inf"),
    "pixel_accuracy": 0.5, "mean_iou": 0.25, "class_iou": [0.5, None],
    "learning_rate": 0.1, "seconds": 2.0,
    "waits": {"data": 0.0, "each_other": 0.25, "gradients": 0.0},
}  # fmt: skip


def a_checkpoint():
    parameters = {"w": np.eye(2, dtype="f4"), "b": np.ones(3, "f4")}
    momenta = {0: np.ones((2, 2), "f4"), 12: np.zeros(3, "f4")}
    log = [ENTRY, {**ENTRY, "epoch": 2}]
    config = Config.from_dict({"crop_size": 64})
    return checkpoint.Checkpoint(config, ("a", "b"), 2, log, parameters, momenta)


def members(path):
    """The members of an archive, name to bytes."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def write_members(path, content, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in content.items() if isinstance(content, dict) else content:
            archive.writestr(name, data)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def meta_of(path):
    return json.loads(np.load(path)["meta"].item())


def rewrite(path, change, target=None):
    """Apply `change` to the settings and counts of a checkpoint."""
    content, meta = members(path), meta_of(path)
    changed = change(meta)
    changed = meta if changed is None else changed
    content["meta.npy"] = npy(np.array(json.dumps(changed)))
    write_members(target or path, content)
