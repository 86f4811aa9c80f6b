"""Images and label maps in two folders: images/SPLIT/NAME.jpg, labels/SPLIT/NAME.png.

All label files are read once before training starts, so that a label out of range or a
missing partner is found then and not in the tenth epoch.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageFile

from ..errors import UserError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")
UNLABELLED = 255


class FolderDataset:
    may_flip = True

    def __init__(self, split, config):
        root = Path(config.data_root)
        self.classes = _class_names(config)
        self._ignore = {UNLABELLED, config.ignore_label}
        self._pairs = _pairs(root, split)
        for image, label in self._pairs:
            self._check_pair(image, label)

    def __len__(self):
        return len(self._pairs)

    def load(self, index):
        image, label = self._pairs[index]
        return read_image(image), self._read_label(label)

    def _read_label(self, path):
        label = _decoded(path)
        if label.mode not in ("L", "P", "1", "I", "I;16"):
            raise UserError(
                f"The label file {path} has mode {label.mode}, but must have a single "
                "channel whose values are class numbers."
            )
        values = np.asarray(label).astype(np.int32)
        return np.where(np.isin(values, list(self._ignore)), -1, values)

    def _check_pair(self, image, label):
        values = self._read_label(label)
        if values.max() >= len(self.classes) or values.min() < -1:
            wrong = values.max() if values.max() >= len(self.classes) else values.min()
            raise UserError(
                f"The label file {label} contains the label {wrong}, but the "
                f"{len(self.classes)} classes are 0 to {len(self.classes) - 1} "
                f"and only {sorted(self._ignore)} mean unlabelled (--ignore-label)."
            )
        try:
            with Image.open(image) as picture:
                size = picture.size
        except (OSError, ValueError):
            raise UserError(f"The file {image} is not a readable image.") from None
        if size != values.shape[::-1]:
            raise UserError(
                f"The image {image} has {size[0]}x{size[1]} pixels, but its label file "
                f"has {values.shape[1]}x{values.shape[0]}."
            )


def _class_names(config):
    names = tuple(
        name.strip() for name in config.class_names.split(",") if name.strip()
    )
    if not names and not config.num_classes:
        raise UserError("--dataset folder needs --num-classes or --class-names.")
    if names and config.num_classes not in (0, len(names)):
        raise UserError(
            f"--num-classes is {config.num_classes}, but there are {len(names)} names."
        )
    names = names or tuple(f"class {k}" for k in range(config.num_classes))
    if len(names) < 2:
        raise UserError("A segmentation needs at least two classes.")
    return names


def _pairs(root, split):
    folders = [root / "images" / split, root / "labels" / split]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"There is no folder {folder}: --dataset folder expects "
                "images/SPLIT/NAME.jpg and labels/SPLIT/NAME.png under --data-root, "
                "with the splits train and val (and test for ablation.py)."
            )
    images = sorted(
        path for path in folders[0].iterdir() if path.suffix.lower() in IMAGE_ENDINGS
    )
    if not images:
        raise UserError(f"The folder {folders[0]} holds no .jpg or .png image.")
    pairs = [(path, folders[1] / f"{path.stem}.png") for path in images]
    for image, label in pairs:
        if not label.is_file():
            raise UserError(f"The image {image} has no label file {label}.")
    return pairs


def refuse_truncated_images():
    """Undo what `import gluoncv` does to Pillow: grey areas for missing data."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False


def _decoded(path):
    refuse_truncated_images()
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture
    except (OSError, ValueError, SyntaxError):
        raise UserError(f"The file {path} is not a readable image.") from None


def read_image(path):
    """The image as uint8 (height, width, 3)."""
    return np.asarray(_decoded(path).convert("RGB"))
