"""Time what this layer and MXNet's own layers add to forward and backward of a net.

Each layer is between identities or between convolutions. Its results must equal a
float64 batch normalization, unless it is nn.BatchNorm on two contexts.

    python scripts/benchmarks/benchmark_layer.py  # as in docs/benchmarks.md, 4 minutes
"""

import itertools
import os
import sys

import gluon_syncbn

import benchmarking
import mxnet as mx
import numpy as np
import tables
from mxnet.gluon import contrib, nn
from support.helpers import MODES, queue_step, set_mode, train_step
from support.reference import backward, forward

LAYERS = {
    "gluon_syncbn": lambda count: gluon_syncbn.SyncBatchNorm(num_devices=count),
    "BatchNorm": lambda count: nn.BatchNorm(),
    "contrib": lambda count: contrib.nn.SyncBatchNorm(num_devices=count),
}
# The operators before and after a layer.
PLACES = {
    "identities": lambda channels: nn.HybridLambda("identity"),
    "convolutions": lambda channels: nn.Conv2D(
        channels, 1, groups=channels, use_bias=False, weight_initializer="ones"
    ),
}
ERROR_BOUND = 1e-4  # results are about 1 and computed in float32


def step_of(place, mode, name, devices, x, dy):
    """Verify a layer and return a function that runs forward and backward."""
    net, ones = nn.HybridSequential(), np.ones(x.shape[1])
    before, after = (PLACES[place](len(ones)) for _ in range(2))
    layers = [] if name is None else [LAYERS[name](len(devices))]
    net.add(before, *layers, after)
    net.initialize(ctx=devices.contexts)
    set_mode(net, mode)
    shards = devices.split(x), devices.split(dy)
    found = train_step(devices, net, *shards)
    # nn.BatchNorm on several contexts computes another function.
    if name in ("gluon_syncbn", "contrib") or name and len(devices) == 1:
        right = forward(x, ones, 0 * ones)[0], backward(x, dy, ones)[0]
        errors = [abs(np.concatenate(a) - b).max() for a, b in zip(found, right)]
        if not max(errors) < ERROR_BOUND:
            sys.exit(f"{name}: errors must be below {ERROR_BOUND}, got {errors}")

    def step():
        queue_step(devices, net, *shards)
        mx.nd.waitall()

    return step


def measure(count, shape, repetitions):
    """Return a row of results for each place, mode and layer on `count` contexts."""
    rng, rows = np.random.default_rng(0), []
    x = rng.normal(3, 2, shape).astype("float32")
    dy = rng.normal(size=shape).astype("float32")
    devices = gluon_syncbn.Devices([mx.cpu(k) for k in range(count)])
    cases = [*itertools.product(PLACES, MODES, [*LAYERS, None])]
    steps = {case: step_of(*case, devices, x, dy) for case in cases}
    times = benchmarking.take_turns(steps, repetitions)
    for place, mode, name in cases:
        if name is not None:
            added = np.subtract(times[place, mode, name], times[place, mode, None])
            row = {"layer": name, "place": place, "mode": mode, "contexts": count}
            row.update(benchmarking.statistics(added), shape=list(shape))
            rows.append(row)
    return rows


def cases(quick):
    # Each context uses half of the cores. MXNet reads the variable when it is imported.
    threads = {"OMP_NUM_THREADS": str(-(-len(os.sched_getaffinity(0)) // 2))}
    size = ((2, 8, 6, 6), 1) if quick else ((8, 256, 60, 60), 15)
    return [(threads, measure, count, *size) for count in (1, 2)]


if __name__ == "__main__":
    benchmarking.run("benchmark_layer", __doc__, cases, tables.layer)
