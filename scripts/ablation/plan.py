"""The plan of the ablation: arms, seeds, settings, and the processes to start.

Called by ablation.py. It must not know how a process is carried out.
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
LAYERS = "bn", "syncbn", "contrib"  # of the cost
NOT_COMPARED = "data_root", "run_dir", "workers"


@dataclass(frozen=True)
class Arm:
    """A kind of norm on some devices with some images each."""

    norm: str
    devices: int
    images: int

    @property
    def batch(self):
        return self.devices * self.images


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


@dataclass(frozen=True)
class Task:
    """A process `python -m ablation.MODULE JSON` that writes one result."""

    name: str
    module: str
    options: dict
    alone: bool = False  # nothing else may run beside it

    @property
    def result(self):
        return Path(self.options["result"])


@dataclass(frozen=True)
class Places:
    """The data set, and where results and run folders go."""

    data: dict
    results: Path
    runs: Path

    def task(self, module, config, name, alone=False, **options):
        name = f"{data_name(self.data)}-{config.model}-{name}"
        compared = {k: v for k, v in config.to_dict().items() if k not in NOT_COMPARED}
        options = {
            **options,
            "settings": {**config.to_dict(), "run_dir": str(self.runs / name)},
            "compared": compared,
            "result": str(self.results / f"{name}.json"),
        }
        return Task(name, module, options, alone)


def data_settings(data_root, class_names, ignore_label):
    """The settings that name a data set: a folder, or the digits that need none."""
    if not data_root:
        return {"dataset": "digits"}
    folder = {"dataset": "folder", "data_root": str(data_root)}
    return {**folder, "class_names": class_names, "ignore_label": ignore_label}


def data_name(data):
    return Path(data.get("data_root", "digits")).resolve().name


def arms(scale):
    """Both norms on every number of devices, and one device with each whole batch."""
    found = [
        Arm(norm, devices, images)
        for devices in scale.devices
        for images in scale.images
        for norm in ("bn", "syncbn")
    ]
    return found + [Arm("syncbn", 1, size) for size in sorted({a.batch for a in found})]


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


def grid_tasks(scale, places):
    """A task for each arm and seed; one seed after the other, so all arms grow."""
    tasks = []
    for seed in range(scale.seeds):
        for arm in arms(scale):
            config = settings(scale, arm, seed, places.data)
            about = {
                "kind": "run", "model": scale.model, "seed": seed, "norm": arm.norm,
                "devices": arm.devices, "images": arm.images,
            }  # fmt: skip
            name = f"{arm.norm}-{arm.devices}x{arm.images}-seed{seed}"
            options = {"about": about, "with_images": not tasks}
            tasks.append(places.task("one_run", config, name, **options))
    return tasks


def agreement_task(scale, places, short, epochs, devices):
    """Several devices beside one, with a batch that all of them can share."""
    arm = Arm("syncbn", 1, 4 * max(devices))
    config = settings(replace(scale, epochs=epochs), arm, 0, places.data)
    about = {"kind": "agreement", "model": scale.model, "devices": devices}
    options = {"about": about, "short": short, "epochs": epochs, "devices": devices}
    return places.task("agreement", config, "agreement", **options)


def cost_task(scale, places, steps, watchdog):
    """Steps with each kind of layer, with the fewest and the most images per device."""
    config = settings(scale, Arm("syncbn", 1, 2), 0, places.data)
    few_and_many = sorted({min(scale.images), max(scale.images)})
    about = {"kind": "cost", "model": scale.model}
    sizes = [(devices, images) for devices in scale.devices for images in few_and_many]
    options = {"about": about, "arms": sizes, "steps": steps, "watchdog": watchdog}
    return places.task("cost", config, "cost", alone=True, layers=LAYERS, **options)
