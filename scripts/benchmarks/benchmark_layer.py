"""Times the layer beside MXNet's own layers, in one run.

Three places are timed, forward plus backward. "inside": what a layer adds to a net,
that is a net of two identities with the layer between them, less the same net without
it, pair by pair. "convolutions": the same with convolutions that compute the identity,
by one weight for each channel; what they exchange with nn.BatchNorm is in a layout of
oneDNN's, and for custom operators MXNet makes it plain and back. "alone": the layer is
called by itself.

Each candidate is compared with a float64 batch normalization of the whole batch first,
and timed only if it is right. Then all candidates take turns, so that noise of the
machine hits all of them; medians are printed and written as JSON, with the bandwidth of
a memory copy.

    python scripts/benchmarks/benchmark_layer.py  # as in docs/benchmarks.md
    python scripts/benchmarks/benchmark_layer.py --repetitions 3 --output layer.json
"""

import argparse
import faulthandler
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import gluon_syncbn
from gluon_syncbn.tools import check

import benchmarking
import mxnet as mx
import numpy as np
from mxnet.gluon import contrib, nn

MODES = list(benchmarking.MODES)
CORES = len(os.sched_getaffinity(0))
LAYERS = {
    "gluon_syncbn": lambda count: gluon_syncbn.SyncBatchNorm(num_devices=count),
    "BatchNorm": lambda count: nn.BatchNorm(),
    "contrib": lambda count: contrib.nn.SyncBatchNorm(num_devices=count),
}
# The operators before and after the layer, for its number of channels.
SURROUNDINGS = {
    "inside": lambda channels: nn.HybridLambda("identity"),
    "convolutions": lambda channels: nn.Conv2D(
        channels, 1, groups=channels, use_bias=False, weight_initializer="ones"
    ),
}
PLACES = *SURROUNDINGS, "alone"
BOUND = 1e-4  # of errors in float32, of results about as large as 1


def candidate_of(name, place, mode, devices, x, dy):
    """A layer in a place, on a batch; without the layer if `name` is None."""
    layers = [] if name is None else [LAYERS[name](len(devices))]
    if place == "alone":
        (net,) = layers
    else:
        net = nn.HybridSequential()
        before, after = (SURROUNDINGS[place](x.shape[1]) for _ in range(2))
        net.add(before, *layers, after)
    benchmarking.set_mode(net, mode)
    return check.Candidate(net, devices, x, dy)


def verify(name, candidate, count, right):
    """Makes a step; exits unless y and dx are right."""
    candidate.step()
    errors = [abs(a - b).max() for a, b in zip(candidate.results(), right)]
    # On several contexts nn.BatchNorm computes another function.
    if not max(errors) < BOUND and not (name == "BatchNorm" and count > 1):
        sys.exit(
            f"{name} on {count} contexts differs from the float64 reference by "
            f"{max(errors):.2g}, so it is not timed"
        )


def verified_steps(devices, modes, x, dy):
    """Functions to time by (layer, place, mode), all of which are right."""
    right, steps = check.oracle(x, dy, np.ones(x.shape[1]))[:2], {}
    for mode in modes:
        for place in SURROUNDINGS:
            nothing = candidate_of(None, place, mode, devices, x, dy)
            steps[None, place, mode] = nothing.step
        for layer, place in itertools.product(LAYERS, PLACES):
            candidate = candidate_of(layer, place, mode, devices, x, dy)
            verify(layer, candidate, len(devices), right)
            steps[layer, place, mode] = candidate.step
    return steps


def measure(shape, count, modes, repetitions):
    """Rows of results, one for each candidate."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, shape).astype("float32")
    dy = rng.normal(size=shape).astype("float32")
    rows = []
    devices = gluon_syncbn.Devices([mx.cpu(k) for k in range(count)])
    steps = verified_steps(devices, modes, x, dy)
    times = benchmarking.take_turns(steps, repetitions)
    for (layer, place, mode), seconds in times.items():
        if layer is None:
            continue
        if place != "alone":
            seconds = np.subtract(seconds, times[None, place, mode])
        row = {"layer": layer, "place": place, "mode": mode, "contexts": count}
        rows.append({**row, **benchmarking.statistics(seconds), "shape": list(shape)})
    return rows


def copy_bandwidth(megabytes=256):
    """Bytes read and written by a memory copy with a thread for each core, in GB/s."""
    source = np.ones(megabytes * 2**20, np.uint8)
    target = np.zeros_like(source)
    parts = [np.array_split(array, CORES) for array in (target, source)]
    with ThreadPoolExecutor(CORES) as pool:  # NumPy releases the interpreter's lock
        steps = {"copy": lambda: list(pool.map(np.copyto, *parts))}
        seconds = benchmarking.take_turns(steps, repetitions=9)["copy"]
    return round(2 * source.nbytes / np.median(seconds) / 1e9, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="8,256,60,60", help="N,C,H,W")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repetitions", type=int, default=15)
    benchmarking.add_output(parser, "benchmark_layer")
    options = parser.parse_args()
    shape, rows = tuple(int(size) for size in options.shape.split(",")), []
    for count in options.contexts:
        if "OMP_NUM_THREADS" in os.environ:
            faulthandler.dump_traceback_later(1200, exit=True)
            rows += measure(shape, count, options.modes, options.repetitions)
            continue
        # Contexts share the cores. MXNet reads its number of threads when it starts.
        threads = str(max(1, CORES // count))
        part = benchmarking.run_apart("--contexts", str(count), OMP_NUM_THREADS=threads)
        rows += part["rows"]
    print(f"shape {shape} float32, forward + backward")
    benchmarking.print_rows(rows, "contexts", "place", "mode", "layer", "median_ms")
    benchmarking.write(options.output, rows, copy_gb_s=copy_bandwidth())


if __name__ == "__main__":
    main()
