"""The differences between several devices and one with the same batches, step by step.

Started by jobs.py as a process, `python -m ablation.agreement JSON`. The same net is
trained on one device and on several, in float64 and in float32, without Dropout, which
draws other numbers on other devices. Beside them stands one device whose initial
parameters are moved at random by a relative 1e-7, as rounding in float32 would move
them: the net itself enlarges a difference by as much.
"""

import json
import sys
from dataclasses import replace

import mxnet as mx
import numpy as np
from benchmarks import benchmarking
from segmentation.config import Config
from segmentation.data import Batches, open_datasets
from segmentation.devices import open_contexts
from segmentation.engine import Engine
from segmentation.errors import exit_code
from segmentation.files import write_json
from segmentation.models import build_model

from .one_run import without_dropout
from .results import rounded

NOISE = 1e-7


def main():
    task = json.loads(sys.argv[1])
    config = replace(Config.from_dict(task["settings"]), hybridize=False)
    rows = []
    for dtype, steps, epochs in (
        ("float64", task["short"], 1),
        ("float32", None, task["epochs"]),
    ):
        alone = Twin(config, 1, dtype).train(epochs, steps)
        rows.append({"dtype": dtype, "devices": 1, "noise": 0.0, **alone})
        others = [(count, 0.0) for count in task["devices"]] + [(1, NOISE)]
        for devices, noise in others:
            found = Twin(config, devices, dtype, noise).train(epochs, steps)
            loss, first = np.array(found["losses"]), np.array(alone["losses"])
            found["differences"] = np.abs(loss / first - 1).tolist()
            rows.append({"dtype": dtype, "devices": devices, "noise": noise, **found})
    document = {**task["about"], "settings": task["compared"], "rows": rows}
    write_json(task["result"], rounded({**document, "machine": benchmarking.machine()}))


class Twin:
    """The net of a seed, on some devices in some precision."""

    def __init__(self, config, devices, dtype, noise=0.0):
        config = replace(config, num_devices=devices)
        contexts = open_contexts(config.ctx, devices)
        self.dtype = dtype
        train_set, val_set = open_datasets(config)
        count = len(train_set.classes)
        net = build_model(config, count, contexts)
        net.apply(without_dropout)
        net.cast(dtype)
        if noise:
            move(net, contexts, noise)
        self.batches = Batches(train_set, config, training=True)
        self.val_batches = Batches(val_set, config, training=False)
        self.engine = Engine(net, contexts, config, self.batches.count, count)

    def train(self, epochs, steps):
        """Losses of the first steps, or of all; the mIoU after each whole epoch."""
        losses, scores = [], []
        for epoch in range(epochs):
            for x, y in self.cast(self.batches.epoch(epoch)):
                if steps is not None and len(losses) == steps:
                    return {"losses": losses}
                losses.append(self.engine.step(x, y, len(losses)))
            self.engine.settle()
            _, confusion = self.engine.evaluate(self.cast(self.val_batches.epoch(0)))
            scores.append(confusion.mean_iou())
        return {"losses": losses, "mean_iou": scores}

    def cast(self, batches):
        return ((x.astype(self.dtype), y.astype(self.dtype)) for x, y in batches)


def move(net, contexts, noise):
    """Multiply every trained parameter by 1 + noise times a normal number."""
    rng = np.random.default_rng(0)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            value = parameter.data(contexts[0]).asnumpy()
            value *= 1 + noise * rng.standard_normal(value.shape)
            parameter.set_data(mx.nd.array(value, dtype=value.dtype))


if __name__ == "__main__":
    sys.exit(exit_code(main))
