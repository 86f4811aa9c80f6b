"""Data sets of (image, label) pairs, all with the same few attributes.

They have `classes` (names), `may_flip` (is a mirrored image still of its class?),
`len()` and `load(index)`, which returns an image, uint8 (height, width, 3), and a label
map, int32 (height, width), -1 where it is unlabelled.
"""

from .batches import Batches
from .digits import DigitScenes
from .folder import FolderDataset, read_image
from .gluoncv_sets import GluonCVDataset

__all__ = ["Batches", "open_datasets", "open_split", "read_image"]


def open_split(split, config):
    """The split "train" or "val", or of the digits and of folders "test"."""
    count = config.train_images if split == "train" else config.val_images
    if config.dataset == "digits":
        return DigitScenes(split, count or (600 if split == "train" else 100), config)
    kind = FolderDataset if config.dataset == "folder" else GluonCVDataset
    return kind(split, count, config)


def open_datasets(config):
    """The training and the validation set that the settings ask for."""
    return open_split("train", config), open_split("val", config)
