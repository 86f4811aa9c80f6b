"""GluonCV's own loaders of Pascal VOC, ADE20K, Cityscapes and COCO.

They find and decode the files; scaling and cropping are ours (augment.py), seeded by
image, because GluonCV's draw from a global generator and could not be resumed exactly.
"""

import contextlib
import io
from pathlib import Path

import numpy as np

from ..errors import UserError
from .folder import refuse_truncated_images

# name: (class in gluoncv.data, what the data root must hold)
_KINDS = {
    "voc": ("VOCSegmentation", "VOC2012/ImageSets/Segmentation/val.txt"),
    "ade20k": ("ADE20KSegmentation", "ADEChallengeData2016/images/training"),
    "citys": ("CitySegmentation", "leftImg8bit/train"),
    "coco": ("COCOSegmentation", "annotations/instances_train2017.json"),
}


class GluonCVDataset:
    may_flip = True

    def __init__(self, split, count, config, but_not=None):
        name, expected = _KINDS[config.dataset]
        self._what = f"--dataset {config.dataset}"
        self._root = config.data_root
        if not (Path(self._root) / expected).exists():
            raise UserError(
                f"{self._what} expects {expected} in the folder {self._root}, and it "
                "is not there: see GluonCV's tutorial on preparing this data set."
            )
        self._set = self._open(name, split)
        self.classes = tuple(self._set.CLASSES)
        self._keep = self._without(but_not)[: count or None]
        if not self._keep:
            raise UserError(f"{self._what} found no {split} image in {self._root}.")

    def _open(self, name, split):
        import gluoncv.data

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                loader = getattr(gluoncv.data, name)
                return loader(root=self._root, split=split, mode="testval")
        except ImportError:
            raise UserError(
                f"{self._what} needs the package pycocotools, which is not installed."
            ) from None
        except (AssertionError, OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"GluonCV's loader could not read {self._what} from {self._root}: "
                f"{error or 'a file that is listed there is missing'}."
            ) from None

    def _without(self, other):
        """Indices not in the set `other`: VOC's 'train' is its trainval list."""
        held_out = set(getattr(other._set, "images", ())) if other else ()
        images = getattr(self._set, "images", None)
        if images is None:
            return list(range(len(self._set)))
        return [k for k, path in enumerate(images) if path not in held_out]

    def __len__(self):
        return len(self._keep)

    def load(self, index):
        refuse_truncated_images()
        try:
            image, label = self._set[self._keep[index]]
        except (AssertionError, OSError, ValueError, SyntaxError) as error:
            raise UserError(
                f"Image {index} of {self._what} in {self._root} cannot be read: "
                f"{error or 'its label map holds an unknown label'}."
            ) from None
        return image.asnumpy().astype(np.uint8), label.asnumpy().astype(np.int32)
