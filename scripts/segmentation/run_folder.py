"""The folder of a run: settings, the epochs' parameters and optimizer states, the log.

An epoch's files are written under names of their own, and count from the moment when
`log.json` is replaced: an epoch is there whole or not at all.
"""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from gluon_syncbn import distributed

from filelock import FileLock, Timeout

from .config import Config
from .errors import UserError
from .processes import of_rank0


@contextlib.contextmanager
def held(folder):
    """Make the folder if need be, and keep other runs out; rank 0 does it for all."""
    lock = FileLock(folder / ".lock", timeout=0)
    if distributed.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout):
            lock.acquire()
    if not of_rank0(lock.is_locked):
        raise UserError(
            f"The folder {folder} is in use by another process: wait for its end, or "
            "give another --run-dir."
        )
    try:
        yield
    finally:
        lock.release()


def write_json(path, value):
    """Write a file that is whole or not there."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def save(folder, engine, classes, log):
    """Save the last epoch of `log`; of the others only the best is kept.

    The first epoch of a run takes the place of what is there of another run.
    """
    if len(log) == 1:
        (folder / "log.json").unlink(missing_ok=True)
        settings = {"settings": asdict(engine.config), "classes": classes}
        write_json(folder / "settings.json", settings)
    parameters, states = _files(folder, len(log))
    engine.net.save_parameters(str(parameters))
    engine.trainer.save_states(states)
    write_json(folder / "log.json", log)
    kept = {parameters, states, *_files(folder, best_epoch(log))}
    for path in set(folder.glob("epoch-*")) - kept:
        path.unlink()


def load(folder):
    """The settings, the class names and the log of a run."""
    try:
        found = json.loads((folder / "settings.json").read_text())
        log = json.loads((folder / "log.json").read_text())
        return Config.from_dict(found["settings"]), found["classes"], log
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"The folder {folder} holds no epoch of a run.") from None


def restore(net, folder, epoch, trainer=None):
    """Load the parameters of an epoch, and the states for a trainer that continues."""
    parameters, states = _files(folder, epoch)
    try:
        net.load_parameters(str(parameters))
        if trainer:
            trainer.load_states(states)
    except Exception as error:  # MXNet and pickle have many for a damaged file
        raise UserError(
            f"The files of epoch {epoch} in {folder} are damaged, or of another net "
            f"than its settings describe: {str(error).splitlines()[0]}."
        ) from None


def best_epoch(log):
    """The number of the epoch with the best mean IoU."""
    return max(log, key=lambda entry: entry["mean_iou"])["epoch"]


def _files(folder, epoch):
    """Paths of the parameters and of the optimizer states of an epoch."""
    return [folder / f"epoch-{epoch:04d}.{kind}" for kind in ("params", "states")]
