"""The cost of synchronization: seconds of a training step, and memory.

Started by jobs.py as a process, `python -m ablation.cost JSON`, alone on the machine.
Each kind of layer is measured in another process, because memory is measured by
process, and because MXNet's contrib layer may wait for ever. A layer is right if the
loss of its first step equals that of one device with the whole batch.
"""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial

import mxnet as mx
from benchmarks import benchmarking
from mxnet.gluon import nn
from segmentation.data import open_split
from segmentation.errors import UserError, exit_code

from gluon_syncbn.tools.bench import take_turns

from .process import make_engine, read_task, write_result

TOLERANCE = 1e-4  # of the first loss, in float32; without synchronization it is 1e-2


def main():
    task, config = read_task()
    if "layer" in task:
        print(json.dumps(measured(task, config)))
        return
    rows, failed = [], {}
    for devices, images in task["arms"]:
        case = {"devices": devices, "images": images, "batch": devices * images}
        alone = in_a_process(task, "syncbn", **{**case, "devices": 1})
        for layer in task["layers"]:
            row = failed.get(layer) or in_a_process(task, layer, **case)
            if "failed" in row:
                failed[layer] = row  # once: it may take a long time to fail
            else:
                row["error"] = abs(row["first_loss"] / alone["first_loss"] - 1)
            if layer == "syncbn" and not row.get("error", 1) < TOLERANCE:
                raise UserError(f"The cost of syncbn is not measured: {row}.")
            rows.append({"layer": layer, **case, **row})
    write_result(task, rows=rows)


def in_a_process(task, layer, **case):
    """The measurement of one layer, or the words that say why there is none."""
    options = json.dumps({**task, "layer": layer, **case})
    command = [sys.executable, "-m", "ablation.cost", options]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=task["watchdog"]
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {task['watchdog']} s"}
    if result.returncode:
        return {"failed": (result.stderr.strip().splitlines() or ["no words"])[-1]}
    return json.loads(result.stdout.splitlines()[-1])


def measured(task, config):
    """Seconds of a step and memory of one kind of layer."""
    layer, devices = task["layer"], task["devices"]
    norm = "syncbn" if layer == "syncbn" else "bn"
    config = replace(config, norm=norm, num_devices=devices, batch_size=task["batch"])
    change = partial(use_contrib, devices=devices) if layer == "contrib" else None
    engine, batches = make_engine(config, open_split("train", config), change=change)
    x, y = next(batches.epoch(0))
    losses = []

    def step():
        losses.append(engine.step(x, y, step=0))
        mx.nd.waitall()

    seconds = take_turns({"step": step}, task["steps"])["step"]
    return {
        "first_loss": losses[0],
        **benchmarking.statistics(seconds),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def use_contrib(net, devices):
    """Turn every BatchNorm into MXNet's contrib SyncBatchNorm, in place."""

    def convert(block):
        if type(block) is nn.BatchNorm:
            names = "eps", "momentum", "fix_gamma", "use_global_stats"
            kept = {name: block._kwargs[name] for name in names}
            block._kwargs = {**kept, "ndev": devices, "key": block.prefix}
            block.__class__ = mx.gluon.contrib.nn.SyncBatchNorm

    net.apply(convert)


if __name__ == "__main__":
    sys.exit(exit_code(main))
