"""Time training steps of nets on CPU contexts, relative to nn.BatchNorm's.

A step is forward, a loss and backward, without and with Trainer.step. Before a layer is
timed, the loss and the gradient of the last weight are compared with a float64 step of
nn.BatchNorm on one context with the whole batch. The relative errors of a synchronized
layer must be less than a tenth of nn.BatchNorm's on these contexts, or rounding: ten
times the larger error of nn.BatchNorm in float32 on one context, because forty layers
amplify rounding.

Each synchronized layer has processes of its own, in which nn.BatchNorm is also timed.

    python scripts/benchmarks/benchmark_net.py  # about 12 minutes
"""

import functools
import os
import sys

import gluon_syncbn

import benchmarking
import mxnet as mx
import numpy as np
import tables
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.helpers import MODES, set_mode


def from_gluoncv(name, norm, **options):
    import gluoncv  # the other nets do not need it

    options = {"pretrained_base": False, "aux": False, **options}
    return getattr(gluoncv.model_zoo, name)(11, norm_layer=norm, **options)


def resnet18(norm):
    import gluoncv

    return gluoncv.model_zoo.resnet18_v1b(norm_layer=norm)


def chain(norm, count, channels, size):
    """Return `count` times a convolution, a normalization and a ReLU."""
    net = nn.HybridSequential()
    for _ in range(count):
        convolution = nn.Conv2D(channels, size, padding=size // 2, use_bias=False)
        net.add(convolution, norm(), nn.Activation("relu"))
    return net


# {name: (net, the shape of each context's batch, numbers of contexts)}
NETS = {
    "FastSCNN": (
        functools.partial(from_gluoncv, "FastSCNN", crop_size=160),
        *((1, 3, 160, 160), [2]),
    ),
    "FCN": (functools.partial(from_gluoncv, "FCN", crop_size=96), (1, 3, 96, 96), [2]),
    "DeepLabV3": (
        functools.partial(from_gluoncv, "DeepLabV3", crop_size=96),
        *((1, 3, 96, 96), [2]),
    ),
    "ResNet-18": (resnet18, (4, 3, 112, 112), [2]),
    "10 blocks": (
        functools.partial(chain, count=10, channels=64, size=3),
        *((4, 64, 60, 60), [1, 2]),
    ),
    "40 tiny layers": (
        functools.partial(chain, count=40, channels=8, size=1),
        *((2, 8, 8, 8), [1, 2, 4]),
    ),
}
# The arguments are bound here because norm_kwargs does not reach all FastSCNN layers.
LAYERS = {
    "gluon_syncbn": gluon_syncbn.SyncBatchNorm,
    "BatchNorm": nn.BatchNorm,
    "contrib": gluon.contrib.nn.SyncBatchNorm,
}
# Environment variables of each layer's process. Contrib's layers block a worker thread
# of their context. With one worker, MXNet's default, the branches of FastSCNN
# deadlocked on two contexts in three of three runs.
WORKERS = "MXNET_CPU_WORKER_NTHREADS"
VARIABLES = {"gluon_syncbn": {}, "contrib": {WORKERS: "2"}}


class Candidate:
    """A net with one kind of layer in one graph mode, and a batch."""

    def __init__(self, name, layer, mode, devices, x, dtype="float32"):
        norm = LAYERS[layer]
        if layer != "BatchNorm":
            norm = functools.partial(norm, num_devices=len(devices))
        net = NETS[name][0](norm)
        mx.random.seed(0)  # the same parameters for every kind of layer
        xavier = mx.init.Xavier(magnitude=2)
        net.initialize(xavier, ctx=devices.contexts, force_reinit=True)
        net(mx.nd.zeros(x.shape, ctx=devices.contexts[0]))  # deferred initialization
        net.cast(dtype)
        net.apply(lambda block: setattr(block, "_rate", 0))  # a field of Dropout
        self.net, self.devices = set_mode(net, mode), devices
        options = {"learning_rate": 0.001, "momentum": 0.9}
        self.trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        self.shards = devices.split(x.astype(dtype))

    def loss(self, x):
        y = self.net(x)
        y = y[0] if isinstance(y, (list, tuple)) else y
        return mx.nd.softmax(y, axis=1)[:, 0].square().sum()

    def step(self, update=True):
        """Run a step, without or with the update; return the losses of the shards."""
        with autograd.record():
            losses = self.devices.map(self.loss, self.shards)
        self.devices.map(lambda loss: loss.backward(), losses)
        if update:
            self.trainer.step(sum(map(len, self.shards)))
        mx.nd.waitall()
        return losses

    def results(self):
        """Run a step; return its loss and the gradient of the last weight."""
        loss = sum(shard.asscalar() for shard in self.step())
        weights = self.net.collect_params(".*weight").values()
        return loss, sum(gradient.asnumpy() for gradient in [*weights][-1].list_grad())


def distances(found, right):
    """Return relative errors."""
    norm = np.linalg.norm
    return [norm(a - b) / norm(b) for a, b in zip(found, right)]


def measure(name, count, layer, quick):
    """Return the rows of `layer` and of nn.BatchNorm in each mode."""
    shape, repetitions = NETS[name][1], 1 if quick else 15
    shape = (count * shape[0], *shape[1:])
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    contexts = [mx.cpu(k) for k in range(count)]
    one, devices = map(gluon_syncbn.Devices, (contexts[:1], contexts))
    single, right = (
        Candidate(name, "BatchNorm", "imperative", one, x, dtype).results()
        for dtype in ("float32", "float64")
    )
    rounding = max(distances(single, right))
    case = {"net": name, "shape": list(shape), "contexts": count}
    case["workers"] = os.environ.get(WORKERS, "default")
    rows = []
    for mode in MODES if layer == "gluon_syncbn" and not quick else ["hybridize"]:
        steps, errors = {}, []
        for kind in layer, "BatchNorm":
            candidate = Candidate(name, kind, mode, devices, x)
            errors.append(distances(candidate.results(), right))
            for update in False, True:
                steps[kind, update] = functools.partial(candidate.step, update)
        limits = [max(other / 10, 10 * rounding) for other in errors[1]]
        if not all(error < limit for error, limit in zip(errors[0], limits)):
            rule = f"errors of loss and gradient must be below {limits}"
            sys.exit(f"{name}, {layer}, {mode}: {rule}, got {errors[0]}")
        times = benchmarking.take_turns(steps, repetitions, warm_up=1 if quick else 3)
        for update in False, True:
            for kind in layer, "BatchNorm":
                row = {"layer": kind, "mode": mode, "update": update, **case}
                seconds = times[kind, update]
                rows.append({**row, **benchmarking.statistics(seconds)})
    return rows


def cases(quick):
    for layer, variables in VARIABLES.items():
        for name, (_, _, counts) in NETS.items():
            # Contrib's layer is measured in the nets of segmentation.
            if name in (["FCN"] if quick else ["FastSCNN", "FCN", "DeepLabV3"]) or (
                layer == "gluon_syncbn" and not quick
            ):
                for count in counts:
                    # Each context uses its share of the cores.
                    threads = max(1, len(os.sched_getaffinity(0)) // count)
                    environment = {"OMP_NUM_THREADS": str(threads), **variables}
                    yield environment, measure, name, count, layer, quick


if __name__ == "__main__":
    benchmarking.run("benchmark_net", __doc__, cases, tables.nets)
