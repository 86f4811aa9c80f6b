"""Times training steps of whole segmentation nets on two CPU contexts.

FCN and DeepLabV3 of GluonCV on a dilated ResNet-50, without auxiliary head and without
dropout: forward, loss, backward and Trainer.step, with each kind of normalization, and
with this package's layers that have the net's ReLUs built in where nothing is added in
between ("fused"). What differs between them in a step is the layer, so all are driven
by Devices.map.

The first forward and backward of each net are compared with those of the same net with
nn.BatchNorm on one context, and it is timed only if it is right: `verify` says how near
is near enough. Then the nets take turns, one graph mode after the other.

    python scripts/benchmarks/benchmark_net.py  # about 5 minutes
    python scripts/benchmarks/benchmark_net.py --nets FCN --crop 240
"""

import argparse
import contextlib
import faulthandler
import gc
import io
import os
import sys
from pathlib import Path

# Before MXNet is imported: an explicit, equal number of threads for everyone. The
# contexts share the cores: with more threads than cores a step takes twice as long.
THREADS = max(1, len(os.sched_getaffinity(0)) // 2)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

sys.path.append(str(Path(__file__).resolve().parents[1]))

import benchmarking  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402
from segmentation.engine import SegmentationLoss  # noqa: E402

import gluon_syncbn  # noqa: E402
from gluon_syncbn.tools.bench import take_turns  # noqa: E402

try:
    from gluoncv import model_zoo
except ImportError:
    sys.exit("benchmark_net.py needs GluonCV: pip install 'gluon-syncbn[scripts]'")

CLASSES = 11
MODES = list(benchmarking.MODES)
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
COUNT = {"num_devices": len(CONTEXTS)}
FUSED = "gluon_syncbn fused"
LAYERS = {
    "gluon_syncbn": (gluon_syncbn.SyncBatchNorm, COUNT),
    FUSED: (gluon.nn.BatchNorm, {}),  # converted with fuse=True
    "BatchNorm": (gluon.nn.BatchNorm, {}),  # each context by itself
    "contrib": (gluon.contrib.nn.SyncBatchNorm, COUNT),
}


def make_net(name, layer, crop, contexts):
    """A net on some contexts, with the same parameters for every kind of layer."""
    norm_layer, norm_kwargs = LAYERS[layer]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its crop size
        net = getattr(model_zoo, name)(
            CLASSES,
            backbone="resnet50",
            pretrained_base=False,
            aux=False,
            crop_size=crop,
            ctx=contexts,
            norm_layer=norm_layer,
            norm_kwargs=norm_kwargs,
        )
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts, force_reinit=True)
    net(mx.nd.zeros((1, 3, crop, crop), ctx=contexts[0]))  # allocates the deferred
    net.apply(_without_dropout)
    if layer == FUSED:
        gluon_syncbn.convert_sync_batchnorm(net, fuse=True, **COUNT)
    return net


def _without_dropout(block):
    if isinstance(block, gluon.nn.Dropout):
        block._rate = 0


class Candidate:
    """A net with one kind of layer in one graph mode, and its trainer."""

    def __init__(self, name, layer, crop, devices, mode="imperative"):
        self._devices = devices
        self.net = make_net(name, layer, crop, devices.contexts)
        benchmarking.set_mode(self.net, mode)
        self._loss = SegmentationLoss((1.0,), crop)
        self._trainer = gluon.Trainer(
            self.net.collect_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9}
        )

    def parameters(self):
        return [p.data(p.list_ctx()[0]) for p in self.net.collect_params().values()]

    def set_parameters(self, values):
        for parameter, value in zip(self.net.collect_params().values(), values):
            parameter.set_data(value)

    def set_batch(self, x, label):
        self._xs, self._labels = self._devices.split(x), self._devices.split(label)

    def forward_backward(self):
        """Outputs of all contexts; gradients are under way."""

        def forward(x, label):
            output = self.net(x)[0]
            return output, self._loss(output, label)

        with autograd.record():
            pairs = self._devices.map(forward, self._xs, self._labels)
        self._devices.map(lambda pair: pair[1].backward(), pairs)
        return [output for output, _ in pairs]

    def step(self):
        self.forward_backward()
        self._trainer.step(sum(label.size for label in self._labels))
        mx.nd.waitall()

    def results(self):
        """Outputs, and gradients of the first weights of head and net, of a step."""
        outputs = [output.asnumpy() for output in self.forward_backward()]
        weights = (
            next(iter(part.collect_params().values()))
            for part in (self.net.head, self.net)
        )
        gradients = [sum(g.asnumpy() for g in w.list_grad()) for w in weights]
        return [np.concatenate(outputs), *gradients]


class Oracle:
    """The right results of a net for a batch, and the largest error allowed.

    Fifty layers of float32 amplify rounding: each rounds by up to 2^-24, several times.
    So the input is changed at random by a relative 2^-20, and four times what that
    changes in each result is the tolerance. It has to be less than half of what
    synchronization changes, or the comparison would say nothing.
    """

    NAMES = "output", "gradient of the head", "gradient of the first weight"

    def __init__(self, name, crop, x, label):
        rng = np.random.default_rng(1)
        noise = 1 + 2.0**-20 * rng.normal(size=x.shape)
        with gluon_syncbn.Devices(mx.cpu(0)) as one:
            net = Candidate(name, "BatchNorm", crop, one)
            self.parameters = net.parameters()

            def results(x, label):
                net.set_batch(x, label)
                return net.results()

            self.whole = results(x, label)
            moved = results((x * noise).astype(x.dtype), label)
            shards = [np.array_split(array, len(CONTEXTS)) for array in (x, label)]
            parts = list(zip(*(results(*shard) for shard in zip(*shards))))
        outputs, *gradients = parts
        self.shards = [np.concatenate(outputs), *(sum(g) for g in gradients)]
        self.tolerances = [4 * e for e in self._distances(moved, self.whole)]
        changed = self._distances(self.shards, self.whole)
        for what, tolerance, change in zip(self.NAMES, self.tolerances, changed):
            if not tolerance < change / 2:
                sys.exit(
                    f"{name} at crop {crop} cannot be verified: synchronization "
                    f"changes the {what} by {change:.2g}, rounding by {tolerance:.2g}"
                )

    @staticmethod
    def _distances(results, expected):
        """Root mean squares of the differences, relative to what is expected."""
        return [
            float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
            for a, b in zip(results, expected)
        ]

    def verify(self, candidate, layer, mode):
        """Exits unless the candidate's first step is right."""
        right = self.shards if layer == "BatchNorm" else self.whole
        distances = self._distances(candidate.results(), right)
        for what, tolerance, distance in zip(self.NAMES, self.tolerances, distances):
            if not distance <= tolerance:
                sys.exit(
                    f"{layer}, {mode}: the {what} is wrong by {distance:.2g}, "
                    f"tolerance {tolerance:.2g}"
                )


def measure(name, options):
    """Rows of results of one net, one for each layer and mode."""
    rng = np.random.default_rng(0)
    batch, crop = options.batch * len(CONTEXTS), options.crop
    x = rng.normal(size=(batch, 3, crop, crop)).astype("float32")
    label = rng.integers(0, CLASSES, (batch, crop, crop)).astype("float32")
    oracle = Oracle(name, crop, x, label)
    rows = []
    for mode in options.modes:
        # A layer that waits forever would hang without a word.
        faulthandler.dump_traceback_later(options.watchdog, exit=True)
        with gluon_syncbn.Devices(CONTEXTS) as devices:
            steps = {}
            for layer in LAYERS:
                candidate = Candidate(name, layer, crop, devices, mode)
                candidate.set_parameters(oracle.parameters)
                candidate.set_batch(x, label)
                oracle.verify(candidate, layer, mode)
                steps[layer] = candidate.step
            times = take_turns(steps, options.repetitions, warm_up=1)
        for layer, seconds in times.items():
            row = {"net": name, "layer": layer, "mode": mode, "crop": crop}
            row.update(batch=options.batch, contexts=len(CONTEXTS))
            rows.append({**row, **benchmarking.statistics(seconds)})
        columns = "net", "mode", "layer", "median_ms"
        benchmarking.print_rows(rows[-len(LAYERS) :], *columns)
        del candidate, steps
        gc.collect()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    nets = "FCN", "DeepLabV3"
    parser.add_argument("--nets", nargs="+", choices=nets, default=nets)
    parser.add_argument("--crop", type=int, default=120, help="a multiple of 8")
    parser.add_argument("--batch", type=int, default=2, help="images per context")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--watchdog", type=float, default=1200, help="seconds before a mode is given up"
    )
    benchmarking.add_options(parser, "benchmark_net")
    options = parser.parse_args()
    freed_memory = benchmarking.keep_memory(options)
    rows = [row for name in options.nets for row in measure(name, options)]
    document = {"freed_memory": freed_memory, "rows": rows}
    benchmarking.write(options.output, document)


if __name__ == "__main__":
    main()
