"""Driving scenes for tests: CamVid, where the machine has it.

Used by tests of training. ``GLUON_SYNCBN_CAMVID`` names another folder.
"""

import os
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from support.helpers import ROOT

FOLDER = Path(os.environ.get("GLUON_SYNCBN_CAMVID", ROOT.parent / "shared/data/camvid"))
needs_camvid = pytest.mark.skipif(
    not (FOLDER / "images/train").is_dir(),
    reason=f"CamVid is not in {FOLDER} (GLUON_SYNCBN_CAMVID)",
)
_CAR, _PEDESTRIAN = 8, 9


def cars_and_people(count):
    """Scenes that have both: image, masks, and boxes with 0 for cars, 1 for people.

    A box holds all pixels of its class.
    """
    found = []
    for path in sorted((FOLDER / "images/train").iterdir())[::20]:
        label_file = FOLDER / "labels/train" / f"{path.stem}.png"
        label = mx.image.imread(str(label_file), flag=0).asnumpy()[:, :, 0]
        masks = [label == _CAR, label == _PEDESTRIAN]
        if all(mask.any() for mask in masks) and len(found) < count:
            boxes = [[*_corners(mask), kind] for kind, mask in enumerate(masks)]
            image = mx.image.imread(str(path))
            found.append((image, np.array(masks), np.array(boxes, "float32")))
    return found


def _corners(mask):
    y, x = np.nonzero(mask)
    return x.min(), y.min(), x.max(), y.max()
