"""GluonCV's own loaders of Pascal VOC, ADE20K, Cityscapes and COCO.

They find and decode the files; scaling and cropping are ours (augment.py), seeded by
image, because GluonCV's draw from a global generator and could not be resumed exactly.
"""

import gluoncv.data
import numpy as np
from PIL import ImageFile

from ..errors import UserError

ImageFile.LOAD_TRUNCATED_IMAGES = False  # GluonCV: true, which makes missing data grey

_CLASSES = {
    "voc": "VOCSegmentation",
    "ade20k": "ADE20KSegmentation",
    "citys": "CitySegmentation",
    "coco": "COCOSegmentation",
}
# A missing file, an empty folder, a damaged image, a label map of another data set.
_ERRORS = AssertionError, ImportError, OSError, RuntimeError, ValueError, SyntaxError


class GluonCVDataset:
    may_flip = True

    def __init__(self, split, count, config):
        self._where = f"--dataset {config.dataset} in {config.data_root}"
        loader = getattr(gluoncv.data, _CLASSES[config.dataset])
        options, held_out = {"root": config.data_root, "mode": "testval"}, ()
        try:
            self._set = loader(split=split, **options)
            if config.dataset == "voc" and split == "train":  # the list trainval.txt
                held_out = set(loader(split="val", **options).images)
        except _ERRORS as error:
            raise self._unreadable(error) from None
        self.classes = tuple(self._set.CLASSES)
        indices = range(len(self._set))
        if held_out:
            indices = [k for k in indices if self._set.images[k] not in held_out]
        self._indices = indices[: count or None]

    def _unreadable(self, error):
        return UserError(
            f"GluonCV's loader could not read {self._where} (its tutorials show how to "
            f"prepare it): {' '.join(str(error).split()) or type(error).__name__}."
        )

    def __len__(self):
        return len(self._indices)

    def load(self, index):
        try:
            image, label = self._set[self._indices[index]]
        except _ERRORS as error:
            raise self._unreadable(error) from None
        return image.asnumpy().astype(np.uint8), label.asnumpy().astype(np.int32)
