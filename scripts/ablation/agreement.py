"""The differences between several devices and one with the same batches, step by step.

Started by jobs.py as a process, `python -m ablation.agreement JSON`. The same net is
trained on one device and on several, in float64 and in float32. Beside them stands one
device whose initial parameters are moved at random by a relative 1e-7, as rounding in
float32 would move them: the net itself enlarges a difference by as much.
"""

import sys
from dataclasses import replace
from functools import partial

import mxnet as mx
import numpy as np
from segmentation.data import Batches, open_datasets
from segmentation.errors import exit_code

from .process import make_engine, read_task, write_result

NOISE = 1e-7


def main():
    task, config = read_task()
    config = replace(config, hybridize=False)
    rows = []
    for dtype, steps, epochs in (
        ("float64", task["short"], 1),
        ("float32", None, task["epochs"]),
    ):
        alone = train(config, 1, dtype, 0.0, epochs, steps)
        rows.append({"dtype": dtype, "devices": 1, "noise": 0.0, **alone})
        for devices, noise in [*((n, 0.0) for n in task["devices"]), (1, NOISE)]:
            found = train(config, devices, dtype, noise, epochs, steps)
            loss, first = np.array(found["losses"]), np.array(alone["losses"])
            found["differences"] = np.abs(loss / first - 1).tolist()
            rows.append({"dtype": dtype, "devices": devices, "noise": noise, **found})
    write_result(task, rows=rows)


def train(config, devices, dtype, noise, epochs, steps):
    """Losses of the first steps, or of all; the mIoU after each whole epoch."""
    config = replace(config, num_devices=devices)
    train_set, val_set = open_datasets(config)
    change = partial(prepare, dtype=dtype, noise=noise)
    engine, batches = make_engine(config, train_set, change=change)
    val_batches = Batches(val_set, config, training=False)

    def cast(batches, epoch):
        return ((x.astype(dtype), y.astype(dtype)) for x, y in batches.epoch(epoch))

    losses, scores = [], []
    for epoch in range(epochs):
        for x, y in cast(batches, epoch):
            if steps is not None and len(losses) == steps:
                return {"losses": losses}
            losses.append(engine.step(x, y, len(losses)))
        engine.settle()
        scores.append(engine.evaluate(cast(val_batches, 0))[1].mean_iou())
    return {"losses": losses, "mean_iou": scores}


def prepare(net, dtype, noise):
    """Cast a net; multiply trained parameters by 1 + noise times a normal number."""
    net.cast(dtype)
    rng = np.random.default_rng(0)
    for parameter in net.collect_params().values() if noise else ():
        if parameter.grad_req != "null":
            value = parameter.list_data()[0].asnumpy()
            value *= 1 + noise * rng.standard_normal(value.shape)
            parameter.set_data(mx.nd.array(value, dtype=value.dtype))


if __name__ == "__main__":
    sys.exit(exit_code(main))
