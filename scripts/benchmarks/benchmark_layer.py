"""Times the layer beside MXNet's own layers, in one run.

Three places are timed, forward plus backward. "inside": what a layer adds to a net,
that is a net of two identities with the layer between them, less the same net without
it, pair by pair. "convolutions": the same with convolutions that compute the identity,
by one weight for each channel; what they exchange with nn.BatchNorm is in a layout of
oneDNN's, and for custom operators MXNet makes it plain and back. "alone": the layer is
called by itself.

Each candidate is compared with a float64 batch normalization of the whole batch first,
and timed only if it is right. Then all candidates take turns, so that noise of the
machine hits all of them; medians are printed and written as JSON, with the memory
bandwidth that the run on one context measured. PyTorch's BatchNorm2d is timed too
where PyTorch is installed.

    python scripts/benchmarks/benchmark_layer.py  # as in docs/benchmarks.md
    python scripts/benchmarks/benchmark_layer.py --shape 2,64,30,30 --repetitions 50

benchmark_sizes.py times forward and backward at many sizes.
"""

import argparse
import faulthandler
import itertools
import os

import benchmarking
import mxnet as mx
import numpy as np
import pytorch

import gluon_syncbn
from gluon_syncbn.tools import bench

MODES = list(benchmarking.MODES)


def verified_steps(devices, modes, x, dy):
    """Functions to time by (layer, place, mode), all of which are right."""
    right, steps = bench.whole_batch(x, dy), {}
    for mode in modes:
        options = {"mode": benchmarking.MODES[mode]}
        for place in bench.SURROUNDINGS:
            nothing = bench.make(None, place, devices, x, dy, **options)
            steps[None, place, mode] = nothing.step
        for layer, place in itertools.product(bench.LAYERS, bench.PLACES):
            candidate = bench.make(layer, place, devices, x, dy, **options)
            bench.verify(layer, candidate, len(devices), right)
            steps[layer, place, mode] = candidate.step
    if pytorch.torch and len(devices) == 1:
        steps["PyTorch", "alone", "eager"] = pytorch.TorchCandidate(x, dy).step
    return steps


def measure(shape, counts, modes, repetitions):
    """Rows of results, one for each candidate."""
    rng = np.random.RandomState(0)
    x = rng.normal(3, 2, shape).astype("float32")
    dy = rng.normal(size=shape).astype("float32")
    rows = []
    for count in counts:
        with gluon_syncbn.Devices([mx.cpu(k) for k in range(count)]) as devices:
            steps = verified_steps(devices, modes, x, dy)
            times = bench.take_turns(steps, repetitions)
        for layer, place, mode in times:
            if layer is None:
                continue
            seconds = bench.added(times, layer, place, mode)
            row = {"layer": layer, "place": place, "mode": mode, "contexts": count}
            row.update(benchmarking.statistics(seconds), shape=list(shape))
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="8,256,60,60", help="N,C,H,W")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repetitions", type=int, default=15)
    benchmarking.add_options(parser, "benchmark_layer")
    options = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        return benchmarking.in_processes(options.contexts, options.output)
    freed_memory = benchmarking.keep_memory(options)
    faulthandler.dump_traceback_later(1500, exit=True)
    shape = tuple(int(size) for size in options.shape.split(","))
    bandwidth = benchmarking.bandwidth()
    rows = measure(shape, options.contexts, options.modes, options.repetitions)
    print(f"shape {shape} float32, forward + backward; bandwidth {bandwidth}")
    benchmarking.print_rows(rows, "contexts", "place", "mode", "layer", "median_ms")
    document = {"freed_memory": freed_memory, "bandwidth": bandwidth, "rows": rows}
    benchmarking.write(options.output, document)


if __name__ == "__main__":
    main()
