"""Lists all processes of an experiment, with their settings and estimated times.

Called by ablation.py. It must not know how processes are started.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from . import grid

# A core's seconds for one training image at crop 160, evaluation included, and for the
# start of a process: seen once on a busy 2-core AMD EPYC. They only serve the estimate.
SECONDS = {"fastscnn": 0.09, "fcn": 2.4}
START = 20
LAYERS = "bn", "syncbn", "contrib"  # of the cost
NOT_COMPARED = "data_root", "run_dir", "workers"


@dataclass(frozen=True)
class Task:
    """A process that writes one result."""

    name: str
    module: str
    options: dict
    seconds: float  # expected on one core
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

    def task(self, module, config, name, seconds, alone=False, **options):
        name = f"{grid.data_name(self.data)}-{name}"
        compared = {k: v for k, v in config.to_dict().items() if k not in NOT_COMPARED}
        options = {
            **options,
            "settings": {**config.to_dict(), "run_dir": str(self.runs / name)},
            "compared": compared,
            "result": str(self.results / f"{name}.json"),
        }
        return Task(name, module, options, seconds, alone)


def grid_tasks(scale, places):
    """A task for each arm and seed; one seed after the other, so all arms grow."""
    tasks = []
    for seed in range(scale.seeds):
        for arm in grid.arms(scale):
            config = grid.settings(scale, arm, seed, places.data)
            about = {
                "kind": "run", "model": scale.model, "seed": seed, "norm": arm.norm,
                "devices": arm.devices, "images": arm.images,
            }  # fmt: skip
            name = f"{scale.model}-{arm.name}-seed{seed}"
            options = {"about": about, "with_images": not tasks}
            seconds = START + scale.epochs * epoch_seconds(scale)
            tasks.append(places.task("one_run", config, name, seconds, **options))
    return tasks


def epoch_seconds(scale):
    images = scale.train_images or 367
    return images * SECONDS[scale.model] * (scale.crop_size / 160) ** 2


def agreement_task(scale, places, short, epochs, devices):
    """Several devices beside one, with a batch that all of them can share."""
    arm = grid.Arm("syncbn", 1, 4 * max(devices))
    config = grid.settings(replace(scale, epochs=epochs), arm, 0, places.data)
    about = {"kind": "agreement", "model": scale.model, "devices": devices}
    seconds = START + (2 + len(devices)) * (
        epochs * epoch_seconds(scale) + short * arm.batch * 4 * SECONDS[scale.model]
    )
    return places.task(
        "agreement", config, f"{scale.model}-agreement", seconds,
        about=about, short=short, epochs=epochs, devices=devices,
    )  # fmt: skip


def cost_task(scale, places, steps, watchdog):
    """Steps with each kind of layer, with the fewest and the most images per device."""
    config = grid.settings(scale, grid.Arm("syncbn", 1, 2), 0, places.data)
    few_and_many = sorted({min(scale.images), max(scale.images)})
    arms = [(devices, images) for devices in scale.devices for images in few_and_many]
    images = sum(devices * images for devices, images in arms) * 4 * (steps + 3)
    seconds = images * SECONDS[scale.model] + len(arms) * 4 * START + watchdog
    about = {"kind": "cost", "model": scale.model}
    return places.task(
        "cost", config, f"{scale.model}-cost", seconds, alone=True,
        about=about, arms=arms, steps=steps, watchdog=watchdog, layers=LAYERS,
    )  # fmt: skip
