"""The settings of a run: one dataclass, from the command line, to and from JSON.

A checkpoint carries them, so that predicting and resuming need no options. `TWIN` names
the settings that a resumed run may change without leaving the path of the first run.
"""

import argparse
from dataclasses import MISSING, asdict, dataclass, field, fields, replace

from .errors import UserError

DATASETS = ("digits", "folder", "voc", "ade20k", "citys", "coco")
MODELS = ("fastscnn", "fcn", "pspnet", "deeplabv3", "deeplabv3plus", "danet", "icnet")
BACKBONES = (
    "resnet50", "resnet101", "resnet152",
    "resnest50", "resnest101", "resnest200", "resnest269", "xception",
)  # fmt: skip
TWIN = ("ctx", "data_root", "workers", "run_dir")


def _option(default, text, choices=None, kind=None):
    meta = {"help": text, "choices": choices, "kind": kind or type(default)}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes, and where it writes."""

    dataset: str = _option("digits", "where the images come from", DATASETS)
    data_root: str = _option("", "folder of the data set (not for digits)")
    num_classes: int = _option(0, "classes of --dataset folder")
    class_names: str = _option("", "names of these classes, separated by commas")
    ignore_label: int = _option(
        255, "label of --dataset folder that counts as unlabelled, beside 255"
    )
    train_images: int = _option(
        0, "train on so many images; 0: all there are (digits: 600 scenes)"
    )
    val_images: int = _option(
        0, "validate on so many images; 0: all there are (digits: 100 scenes)"
    )
    model: str = _option("fastscnn", "GluonCV model", MODELS)
    backbone: str = _option(
        "resnet50",
        "GluonCV backbone; fastscnn has its own, deeplabv3plus takes only xception",
        BACKBONES,
    )
    pretrained: bool = _option(
        False, "start from GluonCV's ImageNet weights of the backbone (downloads them)"
    )
    crop_size: int = _option(96, "side of the square crop, a multiple of 32")
    min_scale: float = _option(0.75, "smallest random scale of a training image")
    max_scale: float = _option(1.25, "largest random scale of a training image")
    norm: str = _option(
        "syncbn", "batch norm over all devices, or each by itself", ("syncbn", "bn")
    )
    ctx: str = _option("cpu", "kind of device", ("cpu", "gpu"))
    num_devices: int = _option(
        2,
        "devices; several CPU contexts are simulated devices that share one processor: "
        "they show what the layer computes, not a speed-up",
    )
    hybridize: bool = _option(
        True, "compile the net with static_alloc and static_shape"
    )
    epochs: int = _option(12, "times every training image is seen")
    batch_size: int = _option(8, "images of a step, over all devices")
    lr: float = _option(0.1, "peak learning rate; falls to 0 as (1 - t/T)^0.9")
    warmup_epochs: float = _option(1.0, "epochs of linear warm-up")
    momentum: float = _option(0.9, "momentum of SGD")
    weight_decay: float = _option(1e-4, "weight decay (not of gamma, beta and biases)")
    head_lr_mult: float = _option(1.0, "learning rate of the heads over the backbone's")
    aux_weight: float = _option(
        0.2, "weight of the auxiliary head's loss (fcn, pspnet, deeplabv3*)"
    )
    seed: int = _option(0, "seed of everything random")
    workers: int = _option(0, "threads that load the next batch; 0: load in line")
    run_dir: str = _option("", "run folder; default runs/DATASET-MODEL-NORM")

    @classmethod
    def add_arguments(cls, parser):
        """Add an option for each field; only those given reach the namespace."""
        for item in fields(cls):
            name = "--" + item.name.replace("_", "-")
            text, kind = item.metadata["help"], item.metadata["kind"]
            shown = (
                "" if item.default in ("", MISSING) else f" (default: {item.default})"
            )
            options = {"default": argparse.SUPPRESS, "help": text + shown}
            if kind is bool:
                off = {"dest": item.name, "action": "store_false"}
                parser.add_argument(name, action="store_true", **options)
                parser.add_argument(
                    f"--no-{name[2:]}", **off, default=argparse.SUPPRESS
                )
            elif item.metadata["choices"]:
                parser.add_argument(name, choices=item.metadata["choices"], **options)
            else:
                metavar = {int: "N", float: "X", str: "TEXT"}[kind]
                parser.add_argument(name, type=kind, metavar=metavar, **options)

    @classmethod
    def from_dict(cls, values):
        """The settings in `values`; a key or a type that is not ours is an error."""
        kinds = {item.name: item.metadata["kind"] for item in fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise UserError(f"The setting '{name}' is unknown to this version.")
            if not isinstance(
                value, (int, float) if kinds[name] is float else kinds[name]
            ):
                raise UserError(
                    f"The setting '{name}' should be of type {kinds[name].__name__}, "
                    f"but is {value!r}."
                )
        return cls(**values).validated()

    def to_dict(self):
        return asdict(self)

    def validated(self):
        """Return the settings with their defaults filled in, or raise UserError."""
        config = self
        if not config.run_dir:
            name = f"runs/{config.dataset}-{config.model}-{config.norm}"
            config = replace(config, run_dir=name)
        if config.model == "deeplabv3plus":
            config = replace(config, backbone="xception")
        _check_numbers(config)
        _check_combinations(config)
        return config

    def resumed_with(self, given):
        """These settings with the options given beside --resume, if they may."""
        for name, value in given.items():
            if name not in TWIN and value != getattr(self, name):
                raise UserError(
                    f"The run to resume has --{name.replace('_', '-')} "
                    f"{getattr(self, name)}, not {value}: a resumed run keeps all its "
                    "settings but " + ", ".join(_flag(item) for item in TWIN) + "."
                )
        return replace(self, **given).validated()


def _flag(name):
    return "--" + name.replace("_", "-")


def _check_numbers(config):
    at_least = {
        "num_devices": 1, "epochs": 1, "batch_size": 1, "seed": 0, "workers": 0,
        "num_classes": 0, "train_images": 0, "val_images": 0, "warmup_epochs": 0,
        "momentum": 0, "weight_decay": 0, "aux_weight": 0,
    }  # fmt: skip
    for name, least in at_least.items():
        if not getattr(config, name) >= least:
            raise UserError(
                f"{_flag(name)} is {getattr(config, name)}, not {least} or more."
            )
    for name in ("lr", "head_lr_mult", "min_scale"):
        if not 0 < getattr(config, name) < float("inf"):
            raise UserError(
                f"{_flag(name)} is {getattr(config, name)}, but must be above 0."
            )
    if not config.min_scale <= config.max_scale < float("inf"):
        raise UserError(
            f"--max-scale is {config.max_scale}, but must be at least --min-scale, "
            f"which is {config.min_scale}."
        )
    if config.crop_size < 32 or config.crop_size % 32:
        raise UserError(
            f"--crop-size is {config.crop_size}, but must be a multiple of 32."
        )


def _check_combinations(config):
    if config.dataset == "digits" and config.data_root:
        raise UserError("--data-root has no use with --dataset digits.")
    if config.dataset != "digits" and not config.data_root:
        raise UserError(f"--dataset {config.dataset} needs --data-root.")
    if config.dataset != "folder" and (config.num_classes or config.class_names):
        raise UserError("--num-classes and --class-names are for --dataset folder.")
    if config.backbone == "xception" and config.model != "deeplabv3plus":
        raise UserError("The backbone xception belongs to --model deeplabv3plus.")
    if config.model == "fastscnn" and config.pretrained:
        raise UserError("GluonCV has no ImageNet weights for fastscnn.")
