"""Measure the memory of a training step of a 50-layer net with LeakyReLU.

The net is ResNet-50 with the activation after every normalization ("pre-activation", He
et al., arXiv:1603.05027). Only the variant "built in" has it in the layer. A variant is
measured, in a new process on one CPU context, only if its float64 results equal the
first variant's. "after forward" is the memory that backward needs.

    python scripts/benchmarks/benchmark_memory.py  # about 5 minutes
    python scripts/benchmarks/benchmark_memory.py --batch 2 --crop 96 --modes hybridize
"""

import itertools
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

from gluon_syncbn import SyncBatchNorm

import benchmarking
import mxnet as mx
import numpy as np
from mxnet import autograd, profiler
from mxnet.gluon import HybridBlock, nn

VARIANTS = {
    "BatchNorm": lambda: (nn.BatchNorm(), nn.LeakyReLU(0.01)),
    "SyncBatchNorm": lambda: (SyncBatchNorm(num_devices=1), nn.LeakyReLU(0.01)),
    "built in": lambda: (
        SyncBatchNorm(num_devices=1, activation="leaky_relu", slope=0.01),
    ),
}
# (blocks, channels, stride) of each stage
STAGES = (3, 256, 1), (4, 512, 2), (6, 1024, 2), (3, 2048, 2)
COUNTER = "Memory: cpu/0"


def sequence(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def convolution(channels, size=1, stride=1):
    return nn.Conv2D(channels, size, stride, size // 2, use_bias=False)


class Bottleneck(HybridBlock):
    """A residual block that normalizes and activates before each convolution."""

    def __init__(self, channels, stride, project, norm):
        super().__init__()
        self.before = sequence(*norm())
        inner = channels // 4
        self.body = sequence(
            *(convolution(inner), *norm(), convolution(inner, 3, stride), *norm()),
            convolution(channels),
        )
        self.shortcut = convolution(channels, 1, stride) if project else None

    def hybrid_forward(self, F, x):
        z = self.before(x)
        return self.body(z) + (self.shortcut(z) if self.shortcut else x)


def make_net(variant, mode, dtype="float32"):
    """Return the net of a variant. All variants have the same parameters."""
    norm = VARIANTS[variant]
    blocks = [
        Bottleneck(channels, stride if first else 1, first, norm)
        for count, channels, stride in STAGES
        for first in [True] + [False] * (count - 1)
    ]
    stem = convolution(64, 7, 2), *norm(), nn.MaxPool2D(3, 2, 1)
    net = sequence(*stem, *blocks, *norm(), nn.GlobalAvgPool2D(), nn.Dense(10))
    net.cast(dtype)
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 32, 32), dtype=dtype))  # deferred initialization
    benchmarking.set_mode(net, mode)
    return net


def forward(net, x):
    with autograd.record():
        y = net(x)
    mx.nd.waitall()
    return y


def verify(mode):
    """Raise unless all variants have the same outputs and gradients."""
    x = np.random.default_rng(0).normal(size=(2, 3, 33, 33))  # 2 x 2 in the last stage
    expected = None
    for variant in VARIANTS:
        net = make_net(variant, mode, "float64")
        y = forward(net, mx.nd.array(x, dtype="float64"))
        y.backward(mx.nd.ones_like(y))
        results = [y.asnumpy(), net[0].weight.grad().asnumpy()]
        expected = expected or results
        for result, right in zip(results, expected):
            error = abs(result - right).max() / abs(right).max()
            if not error < 1e-6:  # LeakyReLU rounds its slope to float32 (2e-8)
                raise ValueError(
                    f"{variant}, {mode}: the relative error is {error:.2g}"
                )


def measure(variant, mode, batch, crop):
    """Return a row of results. The process must have allocated nothing before."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        kinds = "symbolic", "imperative", "api"
        others = {f"profile_{kind}": False for kind in kinds}
        profiler.set_config(profile_memory=True, filename=str(trace), **others)
        profiler.set_state("run")
        net = make_net(variant, mode)
        forward(net, mx.nd.zeros((1, 3, 32, 32))).backward()  # allocates gradients
        x = mx.nd.random.normal(shape=(batch, 3, crop, crop))
        mx.nd.waitall()
        begin = time.time()
        y = forward(net, x)
        middle = time.time()
        y.backward()
        mx.nd.waitall()
        end = time.time()
        profiler.set_state("stop")
        profiler.dump()
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [e for e in events if e.get("ph") == "C" and e["name"] == COUNTER]
    samples = sorted((e["ts"] / 1e6, e["args"][COUNTER] / 1e6) for e in changes)

    def highest(start, stop):
        """Return the largest value from `start` to `stop`."""
        former = [size for when, size in samples if when <= start][-1:]
        return max(former + [size for when, size in samples if start < when <= stop])

    before = highest(begin, begin)
    row = {"variant": variant, "mode": mode, "batch": batch, "crop": crop}
    row["after_forward_mb"] = round(highest(middle, middle) - before, 1)
    return {**row, "peak_mb": round(highest(begin, end) - before, 1)}


def main():
    parser = benchmarking.parser_of("benchmark_memory", __doc__, repetitions=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--crop", type=int, default=240)
    options, rows = parser.parse_args(), []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        pool.map(verify, options.modes)
        for mode, variant in itertools.product(options.modes, VARIANTS):
            case = variant, mode, options.batch, options.crop
            rows.append(pool.apply(measure, case))
    columns = "mode", "variant", "after_forward_mb", "peak_mb"
    benchmarking.write(options.output, rows, *columns)


if __name__ == "__main__":
    main()
