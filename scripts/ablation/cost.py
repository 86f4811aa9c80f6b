"""The cost of synchronization: seconds of a training step, and memory.

Started by jobs.py as a process, `python -m ablation.cost JSON`, alone on the machine.
Each kind of layer is measured in a process of its own, because memory is measured by
process, and because MXNet's contrib layer may wait for ever. A layer is right if the
loss of its first step equals that of one device with the whole batch.
"""

import json
import resource
import subprocess
import sys
import time

import mxnet as mx
import numpy as np
from benchmarks import benchmarking
from mxnet.gluon import nn
from segmentation.config import Config
from segmentation.data import Batches, open_split
from segmentation.devices import open_contexts
from segmentation.engine import Engine
from segmentation.errors import UserError, exit_code
from segmentation.files import write_json
from segmentation.models import build_model

from .one_run import without_dropout
from .results import rounded

WARM_UP = 3
TOLERANCE = 1e-4  # of the first loss, in float32; without synchronization it is 1e-2


def main():
    task = json.loads(sys.argv[1])
    if "layer" in task:
        print(json.dumps(measured(task)))
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
    document = {**task["about"], "settings": task["compared"], "rows": rows}
    write_json(task["result"], rounded({**document, "machine": benchmarking.machine()}))


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


def measured(task):
    """Seconds of a step and memory of one kind of layer."""
    layer, devices = task["layer"], task["devices"]
    norm = "syncbn" if layer == "syncbn" else "bn"
    settings = {"norm": norm, "num_devices": devices, "batch_size": task["batch"]}
    config = Config.from_dict({**task["settings"], **settings})
    contexts = open_contexts(config.ctx, devices)
    train_set = open_split("train", config)
    net = build_model(config, len(train_set.classes), contexts)
    net.apply(without_dropout)
    if layer == "contrib":
        use_contrib(net, devices)
    batches = Batches(train_set, config, training=True)
    engine = Engine(net, contexts, config, batches.count, len(train_set.classes))
    x, y = next(batches.epoch(0))
    losses, seconds = [], []
    for _ in range(WARM_UP + task["steps"]):
        started = time.perf_counter()
        losses.append(engine.step(x, y, step=0))
        mx.nd.waitall()
        seconds.append(time.perf_counter() - started)
    return {
        "first_loss": losses[0],
        **benchmarking.statistics(np.array(seconds[WARM_UP:])),
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
