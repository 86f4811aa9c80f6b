"""Bounds of the settings, alone and together; each refusal is one sentence.

Called by config.py. It must not know which settings there are, but for those that
exclude each other.
"""

from .errors import UserError


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
    if config.min_scale > config.max_scale:
        raise UserError(
            f"--max-scale is {config.max_scale}, but must be at least --min-scale, "
            f"which is {config.min_scale}."
        )
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
    if config.backbone == "xception" and config.model != "deeplabv3plus":
        raise UserError("The backbone xception belongs to --model deeplabv3plus.")
    if config.model == "fastscnn" and config.pretrained:
        raise UserError("GluonCV has no ImageNet weights for fastscnn.")
