"""Images in one folder, images/SPLIT/NAME.jpg, labels in labels/SPLIT/NAME.png."""

from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError


class FolderDataset:
    may_flip = True

    def __init__(self, split, count, config):
        self.classes = tuple(map(str.strip, config.class_names.split(",")))
        if len(self.classes) < 2:
            raise UserError(
                f"--class-names is {config.class_names!r}, but --dataset folder needs "
                "two names or more, separated by commas."
            )
        self._ignored = [255, config.ignore_label]
        folder = Path(config.data_root) / "images" / split
        endings = ".jpg", ".jpeg", ".png"
        images = sorted(p for p in folder.glob("*") if p.suffix.lower() in endings)
        if not images:
            raise UserError(
                f"There is no .jpg or .png image in {folder}: --dataset folder expects "
                "images/SPLIT/NAME.jpg and labels/SPLIT/NAME.png under --data-root, "
                "with the splits train and val (and test for ablation.py)."
            )
        labels = Path(config.data_root) / "labels" / split
        images = images[: count or None]
        self._pairs = [(path, labels / f"{path.stem}.png") for path in images]

    def __len__(self):
        return len(self._pairs)

    def load(self, index):
        path, label_path = self._pairs[index]
        image, label = read_image(path), np.asarray(_opened(label_path))
        if label.shape != image.shape[:2]:
            raise UserError(
                f"The label file {label_path} has the shape {label.shape}, but must "
                f"have the rows and columns of its image, {image.shape[:2]}."
            )
        label = np.where(np.isin(label, self._ignored), -1, label.astype(np.int32))
        if label.max() >= len(self.classes):
            raise UserError(
                f"The label file {label_path} contains the label {label.max()}, but "
                f"the {len(self.classes)} classes are counted from 0, and only "
                f"{self._ignored} mean unlabelled (--ignore-label)."
            )
        return image, label


def _opened(path):
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture
    except (OSError, ValueError, SyntaxError):
        raise UserError(f"The file {path} is not a readable image.") from None


def read_image(path):
    """The image as uint8 (height, width, 3)."""
    return np.asarray(_opened(path).convert("RGB"))
