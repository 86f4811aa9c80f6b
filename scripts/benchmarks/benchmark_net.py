"""Time training steps of segmentation nets on two CPU contexts.

A step is forward, loss, backward and Trainer.step of GluonCV's FastSCNN, FCN or
DeepLabV3. Before a layer is timed, the loss of a step and the gradient of the head's
first weight are compared with a step of one context with the whole batch. The errors
of a synchronized layer must be less than a tenth of nn.BatchNorm's. (Deeper gradients
are no better test, because fifty layers of float32 amplify rounding.)

Each synchronized layer has processes of its own, in which nn.BatchNorm is also timed.

    python scripts/benchmarks/benchmark_net.py  # about 7 minutes
"""

import functools
import os
import sys

import gluon_syncbn

import benchmarking
import gluoncv
import mxnet as mx
import numpy as np
import tables
from mxnet import autograd, gluon
from segmentation.model import NetWithLoss
from support.helpers import MODES, set_mode

CLASSES = 11
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
NETS = "FastSCNN", "FCN", "DeepLabV3"
# The arguments are bound here because norm_kwargs does not reach all FastSCNN layers.
LAYERS = {
    "gluon_syncbn": functools.partial(gluon_syncbn.SyncBatchNorm, num_devices=2),
    "BatchNorm": gluon.nn.BatchNorm,
    "contrib": functools.partial(gluon.contrib.nn.SyncBatchNorm, num_devices=2),
}
# Environment variables of each layer's process. Contrib's layers block a worker thread
# of their context. With one worker, MXNet's default, the branches of FastSCNN
# deadlocked on two contexts in three of three runs.
WORKERS = "MXNET_CPU_WORKER_NTHREADS"
VARIABLES = {"gluon_syncbn": {}, "contrib": {WORKERS: "2"}}


class Candidate:
    """A net with one kind of layer in one graph mode, and a batch."""

    def __init__(self, name, layer, mode, devices, x, y):
        options = {"aux": False, "pretrained_base": False, "norm_layer": LAYERS[layer]}
        options.update(ctx=devices.contexts, crop_size=x.shape[-1])
        net = getattr(gluoncv.model_zoo, name)(CLASSES, **options)
        mx.random.seed(0)  # the same parameters for every kind of layer
        xavier = mx.init.Xavier(magnitude=2)
        net.initialize(xavier, ctx=devices.contexts, force_reinit=True)
        net(mx.nd.zeros(x.shape, ctx=devices.contexts[0]))  # deferred initialization
        net.apply(lambda block: setattr(block, "_rate", 0))  # a field of Dropout
        set_mode(net, mode)
        self.net, self.devices, self.pixels = NetWithLoss(net), devices, y.size
        options = {"learning_rate": 0.001, "momentum": 0.9}
        self.trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        self.shards = devices.split(x), devices.split(y)

    def step(self):
        """Run a training step; return the losses of the images."""
        with autograd.record():
            losses = self.devices.map(self.net, *self.shards)
        self.devices.map(lambda loss: loss.backward(), losses)
        self.trainer.step(self.pixels)
        mx.nd.waitall()
        return losses

    def results(self):
        """Run a step; return its loss and the gradient of the head's first weight."""
        loss, net = sum(shard.sum().asscalar() for shard in self.step()), self.net.net
        head = getattr(net, "head", None) or net.classifier
        weight = next(iter(head.collect_params().values()))
        return loss, sum(gradient.asnumpy() for gradient in weight.list_grad())


def measure(name, layer, quick):
    """Return the rows of `layer` and of nn.BatchNorm in each mode."""
    batch, crop, repetitions = (1, 32, 1) if quick else (2, 128, 5)
    rng, images = np.random.default_rng(0), batch * len(CONTEXTS)
    x = rng.normal(size=(images, 3, crop, crop)).astype("float32")
    y = rng.integers(0, CLASSES, (images, crop, crop)).astype("float32")
    one, devices = map(gluon_syncbn.Devices, (CONTEXTS[0], CONTEXTS))
    right = Candidate(name, "BatchNorm", "imperative", one, x, y).results()
    case = {"net": name, "crop": crop, "batch": batch, "contexts": len(CONTEXTS)}
    case["workers"] = os.environ.get(WORKERS, "default")
    rows = []
    for mode in ["hybridize"] if quick else MODES:
        steps, errors = {}, []
        for kind in layer, "BatchNorm":
            candidate = Candidate(name, kind, mode, devices, x, y)
            pairs = zip(candidate.results(), right)
            errors.append([np.linalg.norm(a - b) for a, b in pairs])
            steps[kind] = candidate.step
        if not all(synchronized < other / 10 for synchronized, other in zip(*errors)):
            rule = "errors of loss and gradient must be below 1/10 of BatchNorm's"
            sys.exit(f"{layer}, {mode}: {rule}, got {errors[0]} and {errors[1]}")
        times = benchmarking.take_turns(steps, repetitions, warm_up=1)
        for kind, seconds in times.items():
            row = {"layer": kind, "mode": mode, **case}
            rows.append({**row, **benchmarking.statistics(seconds)})
    return rows


def cases(quick):
    for layer, variables in VARIABLES.items():
        for name in ["FCN"] if quick else NETS:
            yield variables, measure, name, layer, quick


if __name__ == "__main__":
    benchmarking.run("benchmark_net", __doc__, cases, tables.nets)
