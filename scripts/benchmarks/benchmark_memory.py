"""Measures the memory of a training step of a 50-layer net, by kind of layer.

ResNet-50 with LeakyReLU, in two arrangements: "pre-activation" (He et al.,
arXiv:1603.05027), where a LeakyReLU follows every normalization; and "post-activation"
(He et al., arXiv:1512.03385), where one follows two of three, and the sum of a block is
activated. Three variants: nn.BatchNorm and SyncBatchNorm with LeakyReLU blocks, and
SyncBatchNorm with the activation built in, which lets MXNet free the layer's input.

Each variant is compared with the first in float64, and measured only if it is right.
Then each is measured in another process, in its first step of the size, on one CPU
context: bytes that MXNet's storage holds, by its own profiler (counter "Memory: cpu/0",
which every allocation and release of a tensor updates), relative to before the step,
when parameters and gradients are allocated. "after forward" is what backward needs.

    python scripts/benchmarks/benchmark_memory.py  # about 5 minutes
    python scripts/benchmarks/benchmark_memory.py --batch 2 --crop 96 --modes hybridize
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

# Before MXNet is imported: an explicit, equal number of threads for everyone.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from gluon_syncbn import SyncBatchNorm  # noqa: E402

import benchmarking  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, profiler  # noqa: E402
from mxnet.gluon import HybridBlock, nn  # noqa: E402

MODES = list(benchmarking.MODES)
VARIANTS = {
    "BatchNorm": nn.BatchNorm,
    "SyncBatchNorm": SyncBatchNorm,
    "activation built in": SyncBatchNorm,
}
ARRANGEMENTS = "pre-activation", "post-activation"
# Blocks, channels and stride of each stage.
STAGES = (3, 256, 1), (4, 512, 2), (6, 1024, 2), (3, 2048, 2)
COUNTER = "Memory: cpu/0"


def sequence(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def convolution(channels, size=1, stride=1):
    return nn.Conv2D(channels, size, stride, size // 2, use_bias=False)


def norm_and_activation(variant):
    if variant == "activation built in":
        return (SyncBatchNorm(activation="leaky_relu", slope=0.01),)
    return VARIANTS[variant](), nn.LeakyReLU(0.01)


class Bottleneck(HybridBlock):
    """Normalizes and activates before each convolution; or after it, and the sum."""

    def __init__(self, variant, channels, stride, project, before):
        super().__init__()
        self.before = sequence(*norm_and_activation(variant)) if before else None
        self.body = sequence(
            convolution(channels // 4),
            *norm_and_activation(variant),
            convolution(channels // 4, 3, stride),
            *norm_and_activation(variant),
            convolution(channels),
            *([] if before else [VARIANTS[variant]()]),
        )
        projection = convolution(channels, 1, stride)
        projection = projection if before else sequence(projection, VARIANTS[variant]())
        self.shortcut = projection if project else None
        self.after = None if before else nn.LeakyReLU(0.01)

    def hybrid_forward(self, F, x):
        body_input = x if self.before is None else self.before(x)
        shortcut = x if self.shortcut is None else self.shortcut(body_input)
        y = self.body(body_input) + shortcut
        return y if self.after is None else self.after(y)


def make_net(arrangement, variant, mode, dtype="float32"):
    """The net with the same parameters in every variant."""
    before = arrangement == "pre-activation"
    blocks = [
        Bottleneck(variant, channels, stride if first else 1, first, before)
        for count, channels, stride in STAGES
        for first in [True] + [False] * (count - 1)
    ]
    stem = convolution(64, 7, 2), *norm_and_activation(variant), nn.MaxPool2D(3, 2, 1)
    last = norm_and_activation(variant) if before else ()
    net = sequence(*stem, *blocks, *last, nn.GlobalAvgPool2D(), nn.Dense(10))
    net.cast(dtype)
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 32, 32), dtype=dtype))  # allocates the deferred
    benchmarking.set_mode(net, mode)
    return net


def forward(net, x):
    with autograd.record():
        y = net(x)
    mx.nd.waitall()
    return y


def verify(arrangement, mode):
    """Exits unless the variants' outputs and gradients are those of the first."""
    x = np.random.default_rng(0).normal(size=(2, 3, 33, 33))  # 2 x 2 in the last stage
    expected = None
    for variant in VARIANTS:
        net = make_net(arrangement, variant, mode, "float64")
        y = forward(net, mx.nd.array(x, dtype="float64"))
        y.backward(mx.nd.ones_like(y))
        results = [y.asnumpy(), net[0].weight.grad().asnumpy()]
        expected = expected or results
        for result, right in zip(results, expected):
            # Of float64's digits, fifty layers leave more than that; but LeakyReLU
            # holds its slope in float32, off by a relative 2e-8.
            error = abs(result - right).max() / abs(right).max()
            if not error < 1e-6:
                sys.exit(f"{variant}, {arrangement}, {mode} is wrong by {error:.2g}")


def stored_bytes(trace):
    """(time, bytes) after every change of what MXNet's storage holds on cpu(0)."""
    profiler.set_state("stop")
    profiler.dump()
    events = json.loads(trace.read_text())["traceEvents"]
    changes = [e for e in events if e.get("ph") == "C" and e["name"] == COUNTER]
    return sorted((event["ts"] / 1e6, event["args"][COUNTER]) for event in changes)


def highest(samples, begin, end):
    """The largest value between two times, that at the beginning included."""
    former = [value for time_of, value in samples if time_of <= begin][-1:]
    return max(former + [v for time_of, v in samples if begin < time_of <= end])


def measure(arrangement, variant, mode, batch, crop):
    """A row of results; in a process that has done nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        kinds = "symbolic", "imperative", "api"
        others = {f"profile_{kind}": False for kind in kinds}
        profiler.set_config(profile_memory=True, filename=str(trace), **others)
        profiler.set_state("run")
        net = make_net(arrangement, variant, mode)
        forward(net, mx.nd.zeros((1, 3, 32, 32))).backward()  # gradients, threads
        x = mx.nd.random.normal(shape=(batch, 3, crop, crop))
        mx.nd.waitall()
        begin = time.time()
        y = forward(net, x)
        middle = time.time()
        y.backward()
        mx.nd.waitall()
        end = time.time()
        samples = stored_bytes(trace)
    before = highest(samples, begin, begin)
    row = {"arrangement": arrangement, "variant": variant, "mode": mode}
    row.update(batch=batch, crop=crop, before_mb=round(before / 1e6, 1))
    for name, start, stop in (("after_forward", middle, middle), ("peak", begin, end)):
        above = highest(samples, start, stop) - before
        row[f"{name}_mb"] = round(above / 1e6, 1)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--crop", type=int, default=240)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    benchmarking.add_output(parser, "benchmark_memory")
    options = parser.parse_args()
    if options.case:
        options.output.write_text(json.dumps(measure(*options.case)))
        return
    rows = []
    for arrangement, mode in itertools.product(ARRANGEMENTS, options.modes):
        verify(arrangement, mode)
        for variant in VARIANTS:
            case = arrangement, variant, mode, options.batch, options.crop
            rows.append(benchmarking.run_apart("--case", json.dumps(case)))
    columns = "arrangement", "mode", "variant", "after_forward_mb", "peak_mb"
    benchmarking.print_rows(rows, *columns)
    benchmarking.write(options.output, rows)


if __name__ == "__main__":
    main()
