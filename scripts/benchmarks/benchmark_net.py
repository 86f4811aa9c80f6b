"""Times training steps of whole segmentation nets on two CPU contexts.

FastSCNN of GluonCV, and its FCN and DeepLabV3 on a dilated ResNet-50, without auxiliary
head and without dropout: forward, loss, backward and Trainer.step, with each kind of
normalization. The layer is all that differs between them, so all are driven by
Devices.map.

The loss of each net's first step, and the gradient of the first weight of its head, are
compared with those of one context with the whole batch: a layer is timed only if both
are ten times nearer than without synchronization. Deeper gradients would say less,
because fifty layers of float32 amplify rounding. Then the nets take turns, one graph
mode after the other.

    python scripts/benchmarks/benchmark_net.py  # about 7 minutes
    python scripts/benchmarks/benchmark_net.py --nets FCN --crop 240
"""

import argparse
import faulthandler
import functools
import itertools
import os
import sys
from pathlib import Path

# Before MXNet is imported: an explicit, equal number of threads for everyone. The
# contexts share the cores: with more threads than cores a step takes twice as long.
THREADS = max(1, len(os.sched_getaffinity(0)) // 2)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
# Contrib's layers wait inside of a context's worker. With one, the branches of FastSCNN
# deadlocked on two contexts in each of three runs of a fast machine.
os.environ.setdefault("MXNET_CPU_WORKER_NTHREADS", "2")

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gluon_syncbn  # noqa: E402

import benchmarking  # noqa: E402
import gluoncv  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402
from segmentation.engine import SegmentationLoss  # noqa: E402

CLASSES = 11
MODES = list(benchmarking.MODES)
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
COUNT = {"num_devices": len(CONTEXTS)}
NETS = {
    "FastSCNN": {},
    "FCN": {"backbone": "resnet50"},
    "DeepLabV3": {"backbone": "resnet50"},
}
# Not with norm_kwargs, which do not reach all layers of FastSCNN.
LAYERS = {
    "gluon_syncbn": functools.partial(gluon_syncbn.SyncBatchNorm, **COUNT),
    "BatchNorm": gluon.nn.BatchNorm,  # each context by itself
    "contrib": functools.partial(gluon.contrib.nn.SyncBatchNorm, **COUNT),
}


def make_net(name, layer, crop, contexts):
    """A net on some contexts, with the same parameters for every kind of layer."""
    options = {"aux": False, "crop_size": crop, "norm_layer": LAYERS[layer]}
    options.update(NETS[name], ctx=contexts, pretrained_base=False)
    net = getattr(gluoncv.model_zoo, name)(CLASSES, **options)
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts, force_reinit=True)
    net(mx.nd.zeros((1, 3, crop, crop), ctx=contexts[0]))  # allocates the deferred
    net.apply(_without_dropout)
    return net


def _without_dropout(block):
    if isinstance(block, gluon.nn.Dropout):
        block._rate = 0


class Candidate:
    """A net with one kind of layer in one graph mode, on a batch."""

    def __init__(self, name, layer, mode, devices, x, y):
        self._devices, crop = devices, x.shape[-1]
        net = make_net(name, layer, crop, devices.contexts)
        benchmarking.set_mode(net, mode)
        self._net, self._loss = net, SegmentationLoss((1.0,), crop)
        options = {"learning_rate": 0.001, "momentum": 0.9}
        self._trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        self._shards, self._pixels = (devices.split(x), devices.split(y)), y.size

    def step(self):
        """Trains; returns the losses of the images."""

        def forward(x, label):
            return self._loss(self._net(x)[0], label)

        with autograd.record():
            losses = self._devices.map(forward, *self._shards)
        self._devices.map(lambda loss: loss.backward(), losses)
        self._trainer.step(self._pixels)
        mx.nd.waitall()
        return losses

    def results(self):
        """The loss of a step, and the gradient of the first weight of the head."""
        loss = sum(shard.sum().asscalar() for shard in self.step())
        head = getattr(self._net, "head", None) or self._net.classifier
        weight = next(iter(head.collect_params().values()))
        return loss, sum(gradient.asnumpy() for gradient in weight.list_grad())


def verify(name, mode, candidates, x, y):
    """Exits unless synchronized layers train like one context with the whole batch."""
    one = gluon_syncbn.Devices(mx.cpu(0))
    right = Candidate(name, "BatchNorm", "imperative", one, x, y).results()
    errors = {
        layer: [np.linalg.norm(a - b) for a, b in zip(candidate.results(), right)]
        for layer, candidate in candidates.items()
    }
    bounds = [error / 10 for error in errors.pop("BatchNorm")]
    for layer, found in errors.items():
        if not (found[0] < bounds[0] and found[1] < bounds[1]):
            sys.exit(
                f"{layer}, {mode}: loss and gradient are wrong by {found}, expected "
                f"less than {bounds}, a tenth of what synchronization changes"
            )


def measure(name, mode, options):
    """Rows of results of one net in one mode, one for each layer."""
    # A layer that waits forever would hang without a word.
    faulthandler.dump_traceback_later(1200, exit=True)
    rng, crop = np.random.default_rng(0), options.crop
    batch = options.batch * len(CONTEXTS)
    x = rng.normal(size=(batch, 3, crop, crop)).astype("float32")
    y = rng.integers(0, CLASSES, (batch, crop, crop)).astype("float32")
    devices = gluon_syncbn.Devices(CONTEXTS)
    candidates = {
        layer: Candidate(name, layer, mode, devices, x, y) for layer in LAYERS
    }
    verify(name, mode, candidates, x, y)
    steps = {layer: candidate.step for layer, candidate in candidates.items()}
    times = benchmarking.take_turns(steps, options.repetitions, warm_up=1)
    row = {"net": name, "mode": mode, "crop": crop}
    row.update(batch=options.batch, contexts=len(CONTEXTS))
    return [
        {"layer": layer, **row, **benchmarking.statistics(seconds)}
        for layer, seconds in times.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--crop", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--batch", type=int, default=2, help="images per context")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repetitions", type=int, default=7)
    benchmarking.add_output(parser, "benchmark_net")
    options = parser.parse_args()
    rows = []
    for name, mode in itertools.product(options.nets, options.modes):
        rows += measure(name, mode, options)
    benchmarking.print_rows(rows, "net", "mode", "layer", "median_ms")
    benchmarking.write(options.output, rows, gluoncv=gluoncv.__version__)


if __name__ == "__main__":
    main()
