#!/usr/bin/env python3
"""Train a GluonCV segmentation model with synchronized batch norm on several devices.

    python scripts/train_segmentation.py                # digits, two CPU contexts
    python scripts/train_segmentation.py --dataset voc --data-root DIR --crop-size 480
    python scripts/train_segmentation.py --resume runs/digits-fastscnn-syncbn

The run folder receives config.json, log.json, curves.png, panel.png, sample_*.png and
the checkpoints last.npz and best.npz.
"""

import contextlib
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from segmentation import checkpoint, folder_lock
from segmentation.config import Config
from segmentation.errors import Parser, UserError, exit_code


def arguments(given):
    parser = Parser(description=__doc__.splitlines()[0])
    Config.add_arguments(parser)
    add = parser.add_argument
    add("--resume", metavar="RUN", help="continue a run folder or checkpoint exactly")
    add("--overwrite", action="store_true", help="replace the run in the folder")
    add("--stop-after", type=int, metavar="N", help="stop when N epochs are done")
    text = "in all processes of mpirun, which share --batch-size"
    add("--distributed", action="store_true", help=text)
    options = parser.parse_args(given)
    names = {"resume", "overwrite", "stop_after", "distributed"}
    return options, {k: v for k, v in vars(options).items() if k not in names}


def run_folder(options, given):
    """The folder to write to; what is in it is read when it is locked."""
    if options.stop_after is not None and options.stop_after < 1:
        raise UserError(f"--stop-after is {options.stop_after}, not 1 or more.")
    if not options.resume:
        return Path(Config.from_dict(given).run_dir)
    if options.overwrite:
        raise UserError("--overwrite and --resume exclude each other.")
    source = checkpoint.path_of(options.resume)
    if not source.exists():
        raise UserError(f"There is no checkpoint {source}.")
    return Path(given.get("run_dir") or source.parent)


def settings(folder, options, given):
    """The settings of the run, and the checkpoint to continue from or None."""
    occupied = (folder / "last.npz").exists() and not options.overwrite
    resume, config, former = options.resume, None, None
    if resume:
        former = checkpoint.load(resume)
        config = former.config.resumed_with({**given, "run_dir": str(folder)})
        occupied = occupied and not checkpoint.path_of(resume).parent.samefile(folder)
        end = min(config.epochs, options.stop_after or config.epochs)
        if former.epoch >= end:
            raise UserError(f"The run in {resume} has done all its {end} epochs.")
    if occupied:
        raise UserError(
            f"The folder {folder} holds a run already: give another --run-dir, "
            "continue it with --resume or replace it with --overwrite."
        )
    return config or Config.from_dict(given), former


@contextlib.contextmanager
def locked(folder, is_distributed):
    """Hold the folder's lock, on rank 0; its refusal ends all ranks, told once."""
    if not is_distributed:  # without MXNet, which is slow to import
        with folder_lock.held(folder):
            yield
        return
    from gluon_syncbn import distributed

    with contextlib.ExitStack() as stack:
        refusal = None
        if distributed.rank() == 0:
            try:
                stack.enter_context(folder_lock.held(folder))
            except UserError as error:
                refusal = error
        if distributed.broadcast(bool(refusal)):
            raise refusal or SystemExit(2)
        yield


def train(arguments_given=None):
    options, given = arguments(arguments_given)
    folder = run_folder(options, given)
    if options.distributed:
        from gluon_syncbn import distributed

        distributed.init()
    with locked(folder, options.distributed):
        config, former = settings(folder, options, given)
        from segmentation import training

        try:
            training.run(config, former, options.stop_after)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how_to_continue(folder, options)) from None


def how_to_continue(folder, options):
    """The command that continues an interrupted run; empty without a checkpoint."""
    if not checkpoint.path_of(folder).exists():
        return ""
    command = ["python", sys.argv[0], "--resume", str(folder)]
    if options.distributed:
        command = ["mpirun", "-n", "...", *command, "--distributed"]
    return " ".join(map(shlex.quote, command))


if __name__ == "__main__":
    sys.exit(exit_code(train))
