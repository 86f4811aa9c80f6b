"""The runs of the ablation: arms, seeds, settings, and the rule for the learning rate.

Called by plan.py. It must not know how a run is carried out.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from segmentation.config import Config

CAMVID = (
    "Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist"
)
# Linear scaling (Goyal et al., arXiv:1706.02677) of what train_segmentation.py takes
# for its batch: 0.1 for 8 images. No arm has a rate of its own.
RATE_PER_IMAGE = 0.1 / 8


@dataclass(frozen=True)
class Arm:
    """A kind of norm on some devices with some images each."""

    norm: str
    devices: int
    images: int

    @property
    def batch(self):
        return self.devices * self.images

    @property
    def name(self):
        return f"{self.norm}-{self.devices}x{self.images}"


@dataclass(frozen=True)
class Scale:
    """The size of a grid; 0 images are all that there are."""

    model: str = "fastscnn"
    crop_size: int = 160
    epochs: int = 8
    devices: tuple = (2, 4)
    images: tuple = (1, 2, 4)
    seeds: int = 3
    train_images: int = 0
    eval_images: int = 0

    def changed(self, options):
        """This scale with those of the options that are given."""
        names = {item.name for item in fields(self)}
        given = {k: v for k, v in options.items() if k in names and v is not None}
        return replace(self, **given)


FULL = {
    "fastscnn": Scale(),
    "fcn": Scale("fcn", 96, 3, devices=(2,), images=(1,)),
}
QUICK = {
    "fastscnn": Scale("fastscnn", 96, 4, (2,), (1, 2), 2, 160, 40),
    "fcn": Scale("fcn", 64, 1, (2,), (1,), 1, 24, 16),
}


def arms(scale):
    """Both norms on every number of devices, and one device with each whole batch."""
    found = [
        Arm(norm, devices, images)
        for devices in scale.devices
        for images in scale.images
        for norm in ("bn", "syncbn")
    ]
    return found + [Arm("syncbn", 1, size) for size in sorted({a.batch for a in found})]


def data_settings(data_root, class_names, ignore_label):
    """The settings that name a data set: a folder, or the digits that need none."""
    if not data_root:
        return {"dataset": "digits"}
    return {
        "dataset": "folder",
        "data_root": str(data_root),
        "class_names": class_names,
        "ignore_label": ignore_label,
    }


def data_name(data):
    return Path(data.get("data_root", "digits")).resolve().name


def settings(scale, arm, seed, data):
    """The settings of one run, which training checks like any user's."""
    return Config.from_dict(
        {
            **data,
            "model": scale.model,
            "crop_size": scale.crop_size,
            "epochs": scale.epochs,
            "train_images": scale.train_images,
            "val_images": scale.eval_images,
            "norm": arm.norm,
            "num_devices": arm.devices,
            "batch_size": arm.batch,
            "lr": RATE_PER_IMAGE * arm.batch,
            "seed": seed,
        }
    )
