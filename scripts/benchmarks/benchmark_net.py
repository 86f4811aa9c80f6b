"""Time training steps of segmentation nets on two CPU contexts.

A step is forward, loss, backward and Trainer.step of GluonCV's FastSCNN, FCN or
DeepLabV3. A layer is timed only if it trains like one context with the whole batch: the
loss of the first step, and the gradient of the first weight of the head, must be ten
times closer to one context's than without synchronization. (Deeper gradients are no
better test, because fifty layers of float32 amplify rounding.)

Each synchronized layer has a process of its own, in which nn.BatchNorm is also timed.

    python scripts/benchmarks/benchmark_net.py  # about 7 minutes
    python scripts/benchmarks/benchmark_net.py --nets FCN --crop 240
"""

import functools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gluon_syncbn  # noqa: E402

import benchmarking  # noqa: E402
import gluoncv  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402
from segmentation.model import NetWithLoss  # noqa: E402

CLASSES = 11
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
COUNT = {"num_devices": len(CONTEXTS)}
NETS = {"FastSCNN": {}, "FCN": {"backbone": "resnet50"}}
NETS["DeepLabV3"] = NETS["FCN"]
# The arguments are bound here because norm_kwargs does not reach all FastSCNN layers.
LAYERS = {
    "gluon_syncbn": functools.partial(gluon_syncbn.SyncBatchNorm, **COUNT),
    "BatchNorm": gluon.nn.BatchNorm,
    "contrib": functools.partial(gluon.contrib.nn.SyncBatchNorm, **COUNT),
}
# MXNet reads the variables of a layer's process when it is imported. Contrib's layers
# block a worker thread of their context. With one worker, MXNet's default, the branches
# of FastSCNN deadlocked on two contexts in three of three runs.
WORKERS = "MXNET_CPU_WORKER_NTHREADS"
PROCESSES = {"gluon_syncbn": {}, "contrib": {WORKERS: "2"}}


class Candidate:
    """A net with one kind of layer in one graph mode, and a batch."""

    def __init__(self, name, layer, mode, devices, x, y):
        options = {"aux": False, "crop_size": x.shape[-1], "norm_layer": LAYERS[layer]}
        options.update(NETS[name], ctx=devices.contexts, pretrained_base=False)
        net = getattr(gluoncv.model_zoo, name)(CLASSES, **options)
        mx.random.seed(0)  # the same parameters for every kind of layer
        xavier = mx.init.Xavier(magnitude=2)
        net.initialize(xavier, ctx=devices.contexts, force_reinit=True)
        net(mx.nd.zeros(x.shape, ctx=devices.contexts[0]))  # deferred initialization
        net.apply(lambda block: setattr(block, "_rate", 0))  # a field of Dropout
        benchmarking.set_mode(net, mode)
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


def verify(mode, candidates, right):
    """Exit unless synchronized layers train like one context with the whole batch."""
    errors = {
        layer: [np.linalg.norm(a - b) for a, b in zip(candidate.results(), right)]
        for layer, candidate in candidates.items()
    }
    bounds = [error / 10 for error in errors.pop("BatchNorm")]
    for layer, found in errors.items():
        if not (found[0] < bounds[0] and found[1] < bounds[1]):
            sys.exit(f"{layer}, {mode}: errors must be below {bounds}, got {found}")


def measure(name, layers, options):
    """Return a row of results for each mode and each of `layers`."""
    rng, crop = np.random.default_rng(0), options.crop
    batch = options.batch * len(CONTEXTS)
    x = rng.normal(size=(batch, 3, crop, crop)).astype("float32")
    y = rng.integers(0, CLASSES, (batch, crop, crop)).astype("float32")
    one, devices = map(gluon_syncbn.Devices, (CONTEXTS[0], CONTEXTS))
    right = Candidate(name, "BatchNorm", "imperative", one, x, y).results()
    case = {"net": name, "crop": crop, "batch": options.batch}
    case.update(contexts=len(CONTEXTS), workers=os.environ.get(WORKERS, "default"))
    rows = []
    for mode in options.modes:
        candidates = {k: Candidate(name, k, mode, devices, x, y) for k in layers}
        verify(mode, candidates, right)
        steps = {layer: candidate.step for layer, candidate in candidates.items()}
        times = benchmarking.take_turns(steps, options.repetitions, warm_up=1)
        for layer, seconds in times.items():
            row = {"layer": layer, "mode": mode, **case}
            rows.append({**row, **benchmarking.statistics(seconds)})
    return rows


def main():
    parser = benchmarking.parser_of("benchmark_net", __doc__, repetitions=5)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--crop", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--batch", type=int, default=2, help="images per context")
    options, rows = parser.parse_args(), []
    spawn = multiprocessing.get_context("spawn")
    for layer, variables in PROCESSES.items():
        with mock.patch.dict(os.environ, variables), ProcessPoolExecutor(1, spawn) as p:
            for name in options.nets:
                rows += p.submit(measure, name, (layer, "BatchNorm"), options).result()
    columns = "net", "mode", "workers", "layer", "median_ms"
    bandwidth = benchmarking.copy_bandwidth()
    benchmarking.write(options.output, rows, *columns, copy_gb_s=bandwidth)


if __name__ == "__main__":
    main()
