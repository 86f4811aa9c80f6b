"""The plan of the ablation: arms, seeds, settings, and the processes to start.

Called by ablation.py. It must not know how a process is carried out.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from segmentation.config import Config

CAMVID = (
    "Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist"
)
# Linear scaling (Goyal et al., arXiv:1706.02677) of what train_segmentation.py takes
# for its batch: 0.1 for 8 images. No arm has a rate of its own.
RATE_PER_IMAGE = 0.1 / 8
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


FULL = {
    "fastscnn": Scale(),
    "fcn": Scale("fcn", 96, 3, devices=(2,), images=(1,)),
}
QUICK = {
    "fastscnn": Scale("fastscnn", 96, 4, (2,), (1, 2), 2, 160, 40),
    "fcn": Scale("fcn", 64, 1, (2,), (1,), 1, 24, 16),
}


def arms(scale):
    """Both norms on every number of devices, and one device with whole batches."""
    found = [
        Arm(norm, devices, images)
        for devices in scale.devices
        for images in scale.images
        for norm in ("bn", "syncbn")
    ]
    sizes = sorted({arm.batch for arm in found})
    return found + [Arm("syncbn", 1, size) for size in sizes]


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


class Plan:
    """Makes the tasks of a data set; results and run folders go to these places.

    A task is a dict for the process `python -m ablation.MODULE TASK`, which writes one
    result.
    """

    def __init__(self, data, results, runs):
        self._data, self._results, self._runs = data, results, runs
        self._name = Path(data.get("data_root", "digits")).resolve().name

    def grid(self, scale):
        """A task for each arm and seed; one seed after the other, so all arms grow."""
        tasks = []
        for seed in range(scale.seeds):
            for arm in arms(scale):
                about = {
                    "kind": "run", "model": scale.model, "seed": seed,
                    "norm": arm.norm, "devices": arm.devices, "images": arm.images,
                }  # fmt: skip
                config = settings(scale, arm, seed, self._data)
                name = f"{arm.norm}-{arm.devices}x{arm.images}-seed{seed}"
                options = {"about": about, "with_images": not tasks}
                tasks.append(self._task("one_run", name, config, **options))
        return tasks

    def agreement(self, scale, short, epochs, devices):
        """Several devices beside one, with a batch that all of them can share."""
        arm = Arm("syncbn", 1, 4 * max(devices))
        config = settings(replace(scale, epochs=epochs), arm, 0, self._data)
        about = {"kind": "agreement", "model": scale.model, "devices": devices}
        options = {"about": about, "short": short, "epochs": epochs, "devices": devices}
        return self._task("agreement", "agreement", config, **options)

    def _task(self, module, name, config, **options):
        name = f"{self._name}-{config.model}-{name}"
        values = config.to_dict()
        return {
            "name": name,
            "module": module,
            "settings": {**values, "run_dir": str(self._runs / name)},
            "compared": {k: v for k, v in values.items() if k not in NOT_COMPARED},
            "result": str(self._results / f"{name}.json"),
            **options,
        }
