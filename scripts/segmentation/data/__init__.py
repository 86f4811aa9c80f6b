"""Data sets of (image, label) pairs, all with the same few attributes.

Every data set has `classes` (names), `may_flip` (true if a mirrored image is still of
its class), `len()` and `load(index)`, which returns an image, uint8 (height, width, 3),
and a label map, int32 (height, width), -1 where it is unlabelled.
"""

from .batches import Batches
from .digits import DigitScenes
from .folder import FolderDataset, read_image
from .gluoncv_sets import GluonCVDataset

__all__ = ["Batches", "open_datasets", "open_split", "read_image"]


class _First:
    """The first `count` pairs of a data set."""

    def __init__(self, dataset, count):
        self._dataset, self._count = dataset, count
        self.classes, self.may_flip = dataset.classes, dataset.may_flip
        self.load = dataset.load

    def __len__(self):
        return self._count


def _limited(dataset, count):
    return _First(dataset, count) if 0 < count < len(dataset) else dataset


def open_split(split, config):
    """The split "train", "val" or "test" of the digits, or of a folder of images."""
    count = config.train_images if split == "train" else config.val_images
    if config.dataset == "digits":
        return DigitScenes(split, count or (600 if split == "train" else 100), config)
    return _limited(FolderDataset(split, config), count)


def open_datasets(config):
    """The training and the validation set that the settings ask for."""
    if config.dataset in ("digits", "folder"):
        return open_split("train", config), open_split("val", config)
    val = GluonCVDataset("val", config)
    train = GluonCVDataset("train", config, but_not=val)
    return _limited(train, config.train_images), _limited(val, config.val_images)
