"""The settings of a run: one dataclass, from the command line, to and from JSON.

A run folder keeps them, so that predicting and resuming need no options. A resumed run
may change those of `MAY_CHANGE` without leaving the path of the first run.
"""

import argparse
from dataclasses import asdict, dataclass, field, fields

from .errors import UserError

DATASETS = ("digits", "folder", "voc", "ade20k", "citys", "coco")
MODELS = ("fastscnn", "fcn", "pspnet", "deeplabv3", "deeplabv3plus", "danet", "icnet")
NORMS = "syncbn", "bn"
MAY_CHANGE = "ctx", "data_root"


def _option(default, text, choices=None, least=None):
    """A field; `least` is the smallest value of a number."""
    meta = {"help": text, "choices": choices, "least": least}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes."""

    dataset: str = _option("digits", "where the images come from", DATASETS)
    data_root: str = _option("", "folder of the data set (not for digits)")
    num_classes: int = _option(0, "classes of --dataset folder", least=0)
    class_names: str = _option("", "names of these classes, separated by commas")
    ignore_label: int = _option(255, "another unlabelled value of --dataset folder")
    train_images: int = _option(0, "train on so many; 0: all (digits: 600)", least=0)
    val_images: int = _option(0, "validate on so many; 0: all (digits: 100)", least=0)
    model: str = _option("fastscnn", "GluonCV model", MODELS)
    backbone: str = _option("", "GluonCV backbone in place of the model's own")
    pretrained: bool = _option(
        False, "start from GluonCV's ImageNet weights of the backbone (downloads them)"
    )
    crop_size: int = _option(96, "side of the square crop, a multiple of 32", least=32)
    norm: str = _option("syncbn", "batch norm of all devices or each", NORMS)
    ctx: str = _option("cpu", "kind of device", ("cpu", "gpu"))
    num_devices: int = _option(
        2,
        "devices; several CPU contexts are simulated devices that share one processor: "
        "they show what the layer computes, not a speed-up",
        least=1,
    )
    hybridize: bool = _option(True, "do not compile the net (static_shape)")
    epochs: int = _option(12, "times every training image is seen", least=1)
    batch_size: int = _option(8, "images of a step, over all devices", least=1)
    lr: float = _option(
        0.1, "peak learning rate; falls to 0 as (1 - t/T)^0.9", least=1e-12
    )
    warmup_epochs: float = _option(1.0, "epochs of linear warm-up", least=0)
    momentum: float = _option(0.9, "momentum of SGD", least=0)
    weight_decay: float = _option(1e-4, "weight decay of convolutions", least=0)
    seed: int = _option(0, "seed of everything random", least=0)

    @classmethod
    def add_arguments(cls, parser):
        """Add an option for each field; only those given reach the namespace."""
        for item in fields(cls):
            name, choices = flag(item.name), item.metadata["choices"]
            options = {"default": argparse.SUPPRESS, "dest": item.name}
            text, default = item.metadata["help"], item.default
            if item.type is bool:
                name = name.replace("--", "--no-") if default else name
                options["action"] = "store_false" if default else "store_true"
            else:
                text += "" if default == "" else f" (default: {default})"
                metavar = {int: "N", float: "X", str: "TEXT"}[item.type]
                options.update(choices=choices, metavar=None if choices else metavar)
                options["type"] = item.type
            parser.add_argument(name, help=text, **options)

    @classmethod
    def from_dict(cls, values):
        """The settings in `values`, others by default; UserError for a wrong one."""
        known = {item.name: item.metadata for item in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise UserError(f"The setting {name!r} is unknown.")
            check_value(name, value, known[name])
        config = cls(**values)
        check_together(config)
        return config

    def to_dict(self):
        return asdict(self)

    def resumed_with(self, given):
        """These settings with the options given beside --resume, if they may."""
        for name, value in given.items():
            if name not in MAY_CHANGE and value != getattr(self, name):
                raise UserError(
                    f"The run to resume has {flag(name)} {getattr(self, name)}, not "
                    f"{value}: a resumed run keeps all its settings but "
                    f"{' and '.join(map(flag, MAY_CHANGE))}."
                )
        return self.from_dict({**self.to_dict(), **given})


def flag(name):
    """The option of a setting."""
    return "--" + name.replace("_", "-")


def check_value(name, value, known):
    """Raises UserError for a value that is not what the field's metadata says."""
    choices, least = known["choices"], known["least"]
    if choices and value not in choices:
        wanted = "one of " + ", ".join(choices)
    elif least is not None and not least <= value < float("inf"):
        wanted = f"a number, at least {least}"
    else:
        return
    raise UserError(f"{flag(name)} is {value!r}, but must be {wanted}.")


def check_together(config):
    """Raises UserError for settings that exclude each other."""
    if config.crop_size % 32:
        raise UserError(
            f"--crop-size is {config.crop_size}, but must be a multiple of 32."
        )
    if config.dataset == "digits" and config.data_root:
        raise UserError("--data-root has no use with --dataset digits.")
    if config.dataset != "digits" and not config.data_root:
        raise UserError(f"--dataset {config.dataset} needs --data-root.")
    if config.dataset != "folder" and (config.num_classes or config.class_names):
        raise UserError("--num-classes and --class-names are for --dataset folder.")
    if config.model == "fastscnn" and config.pretrained:
        raise UserError("GluonCV has no ImageNet weights for fastscnn.")
