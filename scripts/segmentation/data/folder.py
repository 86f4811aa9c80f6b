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

    def __init__(self, split, count, config):
        self.classes = _class_names(config)
        self._ignored = [UNLABELLED, config.ignore_label]
        pairs = _pairs(Path(config.data_root), split)
        for image, label in pairs:
            self._check_pair(image, label)
        self._pairs = pairs[: count or None]

    def __len__(self):
        return len(self._pairs)

    def load(self, index):
        image, label = self._pairs[index]
        return read_image(image), self._read_label(label)

    def _read_label(self, path):
        values = np.asarray(_opened(path)).astype(np.int32)
        if values.ndim != 2:
            raise UserError(
                f"The label file {path} has several channels, but must have one, whose "
                "values are class numbers."
            )
        return np.where(np.isin(values, self._ignored), -1, values)

    def _check_pair(self, image, label):
        values, count = self._read_label(label), len(self.classes)
        wrong = values[(values >= count) | (values < -1)]
        if wrong.size:
            raise UserError(
                f"The label file {label} contains the label {wrong[0]}, but the "
                f"{count} classes are 0 to {count - 1} and only {self._ignored} mean "
                "unlabelled (--ignore-label)."
            )
        size = _opened(image, decode=False).size
        if size != values.shape[::-1]:
            raise UserError(
                f"The image {image} has {size[0]}x{size[1]} pixels, but its label file "
                f"has {values.shape[1]}x{values.shape[0]}."
            )


def _class_names(config):
    names = tuple(filter(None, map(str.strip, config.class_names.split(","))))
    names = names or tuple(f"class {k}" for k in range(config.num_classes))
    if len(names) < 2 or config.num_classes not in (0, len(names)):
        raise UserError(
            f"--class-names has {len(names)} names and --num-classes is "
            f"{config.num_classes}, but --dataset folder needs one of both, or equal "
            "numbers, and two classes or more."
        )
    return names


def _pairs(root, split):
    folder = root / "images" / split
    images = folder.glob("*") if folder.is_dir() else ()
    images = sorted(p for p in images if p.suffix.lower() in IMAGE_ENDINGS)
    if not images:
        raise UserError(
            f"There is no .jpg or .png image in {folder}: --dataset folder expects "
            "images/SPLIT/NAME.jpg and labels/SPLIT/NAME.png under --data-root, with "
            "the splits train and val (and test for ablation.py)."
        )
    return [(path, root / "labels" / split / f"{path.stem}.png") for path in images]


def refuse_truncated_images():
    """Undo what `import gluoncv` does to Pillow: grey areas for missing data."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False


def _opened(path, decode=True):
    refuse_truncated_images()
    try:
        with Image.open(path) as picture:
            if decode:
                picture.load()
            return picture
    except (OSError, ValueError, SyntaxError):
        raise UserError(f"The file {path} is not a readable image.") from None


def read_image(path):
    """The image as uint8 (height, width, 3)."""
    return np.asarray(_opened(path).convert("RGB"))
