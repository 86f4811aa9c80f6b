"""GluonCV's own loaders of Pascal VOC, ADE20K, Cityscapes and COCO.

They find and decode the files; scaling and cropping are ours (augment.py), seeded by
image, because GluonCV's draw from a global generator and could not be resumed exactly.
"""

import numpy as np

from ..errors import UserError
from .folder import refuse_truncated_images

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

    def __init__(self, split, count, config, but_not=None):
        import gluoncv.data

        self._where = f"--dataset {config.dataset} in {config.data_root}"
        loader = getattr(gluoncv.data, _CLASSES[config.dataset])
        try:
            self._set = loader(root=config.data_root, split=split, mode="testval")
        except _ERRORS as error:
            raise self._unreadable(error) from None
        self.classes = tuple(self._set.CLASSES)
        indices = range(len(self._set))
        if config.dataset == "voc" and but_not:  # its "train" is the list trainval.txt
            held_out = set(but_not._set.images)
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
        refuse_truncated_images()
        try:
            image, label = self._set[self._indices[index]]
        except _ERRORS as error:
            raise self._unreadable(error) from None
        return image.asnumpy().astype(np.uint8), label.asnumpy().astype(np.int32)
