"""Measures the memory of a training step of a 50-layer net, with and without fusion.

ResNet-50 with LeakyReLU, in two arrangements, see leaky_resnet.py. Three variants:
nn.BatchNorm and SyncBatchNorm with LeakyReLU blocks, and SyncBatchNorm with the
activation fused, which lets MXNet free the layer's input after forward.

Each variant is compared with the first in float64, and measured only if it is right.
Then each is measured in another process, in its first step of the size, on one CPU
context: bytes that MXNet's storage holds, by its own profiler (counter "Memory: cpu/0",
which every allocation and release of a tensor updates), relative to before the step,
when parameters and gradients are allocated. "after forward" is what backward needs: the
activations.

    python scripts/benchmarks/benchmark_memory.py  # about 5 minutes
    python scripts/benchmarks/benchmark_memory.py --batch 2 --crop 96 --modes hybridize
"""

import argparse
import bisect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Before MXNet is imported: an explicit, equal number of threads for everyone.
THREADS = len(os.sched_getaffinity(0))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

import benchmarking  # noqa: E402
import leaky_resnet  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, profiler  # noqa: E402

from gluon_syncbn import convert_sync_batchnorm  # noqa: E402

MODES = list(benchmarking.MODES)
VARIANTS = {
    "BatchNorm": lambda net: net,
    "SyncBatchNorm": lambda net: convert_sync_batchnorm(net, num_devices=1),
    "fused": lambda net: convert_sync_batchnorm(net, num_devices=1, fuse=True),
}
POINTS = 50  # of a curve, in forward and in backward each
COUNTER = "Memory: cpu/0"


def make_net(arrangement, variant, mode, dtype="float32"):
    """The net with the same parameters in every variant."""
    net = VARIANTS[variant](leaky_resnet.resnet50(arrangement))
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


def verify(arrangement, mode, variants):
    """Exits unless the variants' outputs and gradients are those of the first."""
    x = np.random.default_rng(0).normal(size=(2, 3, 33, 33))  # 2 x 2 in the last stage
    expected = None
    for variant in dict.fromkeys(["BatchNorm", *variants]):
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
    times = [t for t, _ in samples]
    first = max(0, bisect.bisect_right(times, begin) - 1)
    return max(value for _, value in samples[first : bisect.bisect_right(times, end)])


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

    def megabytes(begin, end):
        """At the most between two times, above those before the step."""
        return round((highest(samples, begin, end) - before) / 1e6, 1)

    halves = [np.linspace(*t, POINTS + 1) for t in ((begin, middle), (middle, end))]
    parts = [part for edges in halves for part in zip(edges, edges[1:])]
    row = {"arrangement": arrangement, "variant": variant, "mode": mode}
    row.update(batch=batch, crop=crop)
    row["forward_ms"] = round(1e3 * (middle - begin), 1)
    row["backward_ms"] = round(1e3 * (end - middle), 1)
    row["mxnet"] = {
        "before_mb": round(before / 1e6, 1),
        "after_forward_mb": megabytes(middle, middle),
        "peak_mb": megabytes(begin, end),
        "curve_mb": [megabytes(*part) for part in parts],
    }
    return row


def measure_apart(*case):
    """`measure` in another process."""
    with tempfile.NamedTemporaryFile() as output:
        case = json.dumps(case)
        command = [sys.executable, __file__, "--case", case, "--output", output.name]
        subprocess.run(command, check=True, timeout=600)
        return json.loads(Path(output.name).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, choices in (
        ("--arrangements", list(leaky_resnet.BLOCKS)),
        ("--variants", list(VARIANTS)),
        ("--modes", MODES),
    ):
        parser.add_argument(name, nargs="+", choices=choices, default=choices)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--crop", type=int, default=240)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    benchmarking.add_output(parser, "benchmark_memory")
    options = parser.parse_args()
    if options.case:
        options.output.write_text(json.dumps(measure(*options.case)))
        return
    rows = []
    for arrangement, mode in itertools.product(options.arrangements, options.modes):
        verify(arrangement, mode, options.variants)
        size = options.batch, options.crop
        case = [measure_apart(arrangement, v, mode, *size) for v in options.variants]
        lines = [{**row, **row["mxnet"]} for row in case]
        columns = "arrangement", "mode", "variant", "after_forward_mb", "peak_mb"
        benchmarking.print_rows(lines, *columns)
        rows += case
    benchmarking.write(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
