"""Measure the memory of a training step of a 50-layer net with LeakyReLU.

The net is ResNet-50 with the activation after every normalization ("pre-activation", He
et al., arXiv:1603.05027). The variant "built in" has the activation in SyncBatchNorm. A
variant is only measured if its float64 results equal the first variant's.
after_forward_mb is the memory that is kept for backward.

    python scripts/benchmarks/benchmark_memory.py  # about 5 minutes
"""

import itertools
import json
import tempfile
import time
from bisect import bisect
from pathlib import Path

from gluon_syncbn import SyncBatchNorm

import benchmarking
import mxnet as mx
import numpy as np
import tables
from mxnet import autograd, profiler
from mxnet.gluon import HybridBlock, nn
from support.helpers import MODES, differentiate, set_mode

BUILT_IN = {"activation": "leaky_relu", "slope": 0.01}
VARIANTS = {
    "BatchNorm": lambda: [nn.BatchNorm(), nn.LeakyReLU(0.01)],
    "SyncBatchNorm": lambda: [SyncBatchNorm(num_devices=1), nn.LeakyReLU(0.01)],
    "built in": lambda: [SyncBatchNorm(num_devices=1, **BUILT_IN)],
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
    set_mode(net, mode)
    return net


def verify(variant, mode):
    """Raise unless outputs and a gradient equal the first variant's. Return no rows."""
    x, results = np.random.default_rng(0).normal(size=(2, 3, 33, 33)), []
    for candidate in "BatchNorm", variant:
        net = make_net(candidate, mode, "float64")
        y = differentiate(net, mx.nd.array(x, dtype="float64"))
        results.append((y.asnumpy(), net[0].weight.grad().asnumpy()))
    for right, result in zip(*results):
        error = abs(result - right).max() / abs(right).max()
        if not error < 1e-6:  # LeakyReLU rounds its slope to float32 (2e-8)
            raise ValueError(f"{variant}, {mode}: the relative error is {error:.2g}")
    return []


def measure(variant, mode, batch, crop):
    """Return a row of results. The process must have allocated nothing before."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        kinds = "symbolic", "imperative", "api"
        others = {f"profile_{kind}": False for kind in kinds}
        profiler.set_config(profile_memory=True, filename=str(trace), **others)
        profiler.set_state("run")
        net = make_net(variant, mode)
        differentiate(net, mx.nd.zeros((1, 3, 32, 32)))  # allocates gradients
        x = mx.nd.random.normal(shape=(batch, 3, crop, crop))
        mx.nd.waitall()
        begin = time.time()
        with autograd.record():
            y = net(x)
        mx.nd.waitall()
        middle = time.time()
        y.backward()
        mx.nd.waitall()
        profiler.set_state("stop")
        profiler.dump()
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [e for e in events if e.get("ph") == "C" and e["name"] == COUNTER]
    samples = sorted((e["ts"] / 1e6, e["args"][COUNTER] / 1e6) for e in changes)
    times, sizes = zip(*samples)
    first, after_forward = (bisect(times, instant) - 1 for instant in (begin, middle))
    row = {"variant": variant, "mode": mode, "batch": batch, "crop": crop}
    row["after_forward_mb"] = round(sizes[after_forward] - sizes[first], 1)
    row["peak_mb"] = round(max(sizes[first:]) - sizes[first], 1)
    return [row]


def cases(quick):
    size = (2, 32) if quick else (4, 240)
    for mode, variant in itertools.product(["hybridize"] if quick else MODES, VARIANTS):
        yield {}, verify, variant, mode
        yield {}, measure, variant, mode, *size


if __name__ == "__main__":
    benchmarking.run("benchmark_memory", __doc__, cases, tables.memory)
