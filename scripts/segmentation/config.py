"""The settings of a run: one dataclass, from the command line, to and from JSON.

A run folder keeps them, so that predicting and resuming need no options. A resumed run
may change those of `MAY_CHANGE` without leaving the path of the first run.
"""

import argparse
from dataclasses import asdict, dataclass, field, fields

from .errors import UserError

DATASETS = ("digits", "folder", "voc", "ade20k", "citys", "coco")
MODELS = ("fastscnn", "fcn", "pspnet", "deeplabv3", "deeplabv3plus", "danet", "icnet")
MAY_CHANGE = "ctx", "data_root"


def _option(default, text, choices=None, minimum=None):
    """A field; `minimum` is the smallest value of a number."""
    meta = {"help": text, "choices": choices, "minimum": minimum}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes."""

    dataset: str = _option("digits", "where the images come from", DATASETS)
    data_root: str = _option("", "folder of the data set (not for digits)")
    class_names: str = _option("", "of --dataset folder, separated by commas")
    ignore_label: int = _option(255, "another unlabelled value of --dataset folder")
    train_images: int = _option(0, "train on so many; 0: all (digits: 600)", minimum=0)
    val_images: int = _option(0, "validate on so many; 0: all (digits: 100)", minimum=0)
    model: str = _option("fastscnn", "GluonCV model", MODELS)
    backbone: str = _option("", "GluonCV backbone in place of the model's own")
    pretrained: bool = _option(False, "start from GluonCV's ImageNet weights")
    crop_size: int = _option(
        96, "side of the square crop, a multiple of 32", minimum=32
    )
    norm: str = _option("syncbn", "of all devices together or each", ("syncbn", "bn"))
    ctx: str = _option("cpu", "kind of device", ("cpu", "gpu"))
    num_devices: int = _option(2, "CPU contexts share one processor", minimum=1)
    epochs: int = _option(12, "times every training image is seen", minimum=1)
    batch_size: int = _option(8, "images of a step, over all devices", minimum=1)
    lr: float = _option(0.1, "peak; falls to 0 as (1 - t/T)^0.9", minimum=1e-12)
    warmup_epochs: float = _option(1.0, "epochs of linear warm-up", minimum=0)
    momentum: float = _option(0.9, "momentum of SGD", minimum=0)
    weight_decay: float = _option(1e-4, "weight decay of convolutions", minimum=0)
    seed: int = _option(0, "seed of everything random", minimum=0)

    @classmethod
    def add_arguments(cls, parser):
        """Add an option for each field; only those given reach the namespace."""
        for item in fields(cls):
            text, choices = item.metadata["help"], item.metadata["choices"]
            options = {"type": item.type, "choices": choices}
            if item.type is bool:
                options = {"action": "store_true"}
            elif item.default != "":
                text += f" (default: {item.default})"
            default = argparse.SUPPRESS
            parser.add_argument(flag(item.name), help=text, default=default, **options)

    @classmethod
    def from_dict(cls, values):
        """The settings in `values`, others by default; UserError for a wrong one."""
        config = cls(**values)
        for item in fields(cls):
            value, minimum = getattr(config, item.name), item.metadata["minimum"]
            if minimum is not None and not minimum <= value < float("inf"):
                raise UserError(
                    f"{flag(item.name)} is {value}, but must be at least {minimum}."
                )
        if config.crop_size % 32:
            raise UserError(
                f"--crop-size is {config.crop_size}, but must be a multiple of 32."
            )
        if (config.dataset == "digits") != (not config.data_root):
            raise UserError(
                f"--dataset is {config.dataset} and --data-root is "
                f"{config.data_root!r}, but digits have none, and all others need it."
            )
        if config.model == "fastscnn" and config.pretrained:
            raise UserError("GluonCV has no ImageNet weights for --model fastscnn.")
        return config

    def resumed_with(self, given):
        """These settings with the options given beside --resume, if they may."""
        for name, value in given.items():
            if name not in MAY_CHANGE and value != getattr(self, name):
                raise UserError(
                    f"The run to resume has {flag(name)} {getattr(self, name)}, not "
                    f"{value}: a resumed run keeps all its settings but "
                    f"{' and '.join(map(flag, MAY_CHANGE))}."
                )
        return self.from_dict({**asdict(self), **given})


def flag(name):
    """The option of a setting."""
    return "--" + name.replace("_", "-")
