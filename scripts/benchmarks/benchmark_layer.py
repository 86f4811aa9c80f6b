"""Time what a layer adds to forward and backward of a net, beside MXNet's own layers.

The places are "inside" (between identities) and "convolutions". A layer is only timed
if its results equal a float64 batch normalization. All layers take turns.

    python scripts/benchmarks/benchmark_layer.py  # as in docs/benchmarks.md
    python scripts/benchmarks/benchmark_layer.py --repetitions 3 --output layer.json
"""

import os
import sys

# Contexts share the cores. MXNet reads its number of threads when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", str(-(-len(os.sched_getaffinity(0)) // 2)))

import gluon_syncbn  # noqa: E402

import benchmarking  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd  # noqa: E402
from mxnet.gluon import contrib, nn  # noqa: E402

LAYERS = {
    "gluon_syncbn": lambda count: gluon_syncbn.SyncBatchNorm(num_devices=count),
    "BatchNorm": lambda count: nn.BatchNorm(),
    "contrib": lambda count: contrib.nn.SyncBatchNorm(num_devices=count),
    None: lambda count: nn.HybridLambda("identity"),
}
# The operators before and after a layer.
PLACES = {
    "inside": lambda channels: nn.HybridLambda("identity"),
    "convolutions": lambda channels: nn.Conv2D(
        channels, 1, groups=channels, use_bias=False, weight_initializer="ones"
    ),
}
ERROR_BOUND = 1e-4  # results are about 1 and computed in float32


def oracle(x, dy):
    """Return y and dx of a float64 batch normalization."""
    x, dy, axes = x.astype(float), dy.astype(float), (0, 2, 3)
    inv_std = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    y = (x - x.mean(axes, keepdims=True)) * inv_std
    mean_dy, mean_dy_y = (a.mean(axes, keepdims=True) for a in (dy, dy * y))
    return y, inv_std * (dy - mean_dy - y * mean_dy_y)


def step_of(name, place, mode, devices, x, dy):
    """Verify a layer and return a function that runs forward and backward."""
    net = nn.HybridSequential()
    before, after = (PLACES[place](x.shape[1]) for _ in range(2))
    net.add(before, LAYERS[name](len(devices)), after)
    net.initialize(ctx=devices.contexts)
    benchmarking.set_mode(net, mode)
    xs, dys = devices.split(x), devices.split(dy)
    for shard in xs:
        shard.attach_grad()

    def step():
        with autograd.record():
            ys = devices.map(net, xs)
        devices.map(lambda y, dy: y.backward(dy), ys, dys)
        mx.nd.waitall()
        return ys

    found = step(), [shard.grad for shard in xs]
    errors = [
        abs(np.concatenate([a.asnumpy() for a in arrays]) - right).max()
        for arrays, right in zip(found, oracle(x, dy))
    ]
    # nn.BatchNorm on several contexts computes another function.
    has_oracle = name in ("gluon_syncbn", "contrib") or name and len(devices) == 1
    if has_oracle and not max(errors) < ERROR_BOUND:
        sys.exit(
            f"{name} differs from float64 by {max(errors):.2g}, so no time is valid"
        )
    return step


def measure(shape, count, modes, repetitions):
    """Return rows of results, one for each candidate."""
    rng, rows = np.random.default_rng(0), []
    x = rng.normal(3, 2, shape).astype("float32")
    dy = rng.normal(size=shape).astype("float32")
    devices = gluon_syncbn.Devices([mx.cpu(k) for k in range(count)])
    cases = [(name, p, m) for m in modes for p in PLACES for name in LAYERS]
    steps = {case: step_of(*case, devices, x, dy) for case in cases}
    times = benchmarking.take_turns(steps, repetitions)
    for name, place, mode in cases:
        added = np.subtract(times[name, place, mode], times[None, place, mode])
        row = {"layer": name, "place": place, "mode": mode, "contexts": count}
        row.update(benchmarking.statistics(added), shape=list(shape))
        rows += [row] if name else []
    return rows


def main():
    parser = benchmarking.parser_of("benchmark_layer", __doc__, repetitions=15)
    parser.add_argument("--shape", default="8,256,60,60", help="N,C,H,W")
    options = parser.parse_args()
    shape, rows = tuple(map(int, options.shape.split(","))), []
    for count in 1, 2:
        rows += measure(shape, count, options.modes, options.repetitions)
    columns = "contexts", "place", "mode", "layer", "median_ms"
    bandwidth = benchmarking.copy_bandwidth()
    benchmarking.write(options.output, rows, *columns, copy_gb_s=bandwidth)


if __name__ == "__main__":
    main()
