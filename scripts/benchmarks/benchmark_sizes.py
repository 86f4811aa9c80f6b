"""Times forward and backward of the layer at sizes of real nets, beside the bandwidth.

Sizes are those of a dilated ResNet-50 at crops of 240 and 480; ResNet-101 has the same,
more of them of stage 3. Layers run in static_shape graphs, in two places as in
benchmark_layer.py: "alone", and "inside" a net of two identities, less that net without
the layer. Each is compared with float64 NumPy first, and timed only if it is right.
Then they take turns of three steps, of which the first is not timed: threads of the
layer before may still be awake in it.

GB/s are the least bytes over the time: forward reads x twice and writes y, backward
reads x and dy twice and writes dx, 3 and 5 passes over the tensor. Beside them stands
the copy bandwidth, the better of before and after. Tensors that fit into the last level
of cache can exceed it.

    python scripts/benchmarks/benchmark_sizes.py  # the table, 8 minutes
    python scripts/benchmarks/benchmark_sizes.py --sizes tiny "stage1 240" --seconds 10
"""

import argparse
import collections
import faulthandler
import os
import sys
import time

import benchmarking
import mxnet as mx
import numpy as np
import pytorch

import gluon_syncbn
from gluon_syncbn.tools import bench

# Channels and height of what a layer normalizes.
SIZES = {
    "tiny": (16, 8),
    "stem 240": (64, 120),
    "stage1 240": (256, 60),
    "stage2 240": (512, 30),
    "stage3 240": (1024, 30),
    "stage4 240": (2048, 30),
    "stem 480": (64, 240),
    "stage1 480": (256, 120),
    "stage2 480": (512, 60),
    "stage3 480": (1024, 60),
    "stage4 480": (2048, 60),
}
PASSES = {"forward": 3, "backward": 5, "both": 8}

Case = collections.namedtuple("Case", "size batch dtype channels contexts")


def table():
    """Every size; of some of them other batches, dtypes, layouts and contexts."""
    plain = "float32", "first", 1
    cases = [Case(s, 2 if s.endswith("480") else 4, *plain) for s in SIZES]
    cases += [Case("stage1 240", batch, *plain) for batch in (1, 8)]
    cases += [Case("stage4 480", 1, *plain)]
    for size in "tiny", "stage1 240", "stage4 240":
        cases += [
            Case(size, 4, "float32", "last", 1),
            Case(size, 4, "float16", "first", 1),
            Case(size, 4, "float16", "last", 1),
            Case(size, 4, "float32", "first", 2),
            Case(size, 4, "float32", "first", 4),
        ]
    return cases


def batch_of(case):
    """x and dy of a case, and the axis of its channels."""
    channels, side = SIZES[case.size]
    shape = [case.batch * case.contexts, channels, side, side]
    if case.channels == "last":
        shape.append(shape.pop(1))
    rng = np.random.RandomState(0)
    x = rng.normal(3, 2, shape).astype(case.dtype)
    dy = rng.normal(size=shape).astype(case.dtype)
    return x, dy, shape.index(channels, 1)


def candidates_of(case, devices, x, dy, axis):
    """The candidates of a case, by layer and place; (None, "inside") is no layer."""
    names = [(None, "inside")]
    for layer in "gluon_syncbn", "BatchNorm":
        names += [(layer, "inside"), (layer, "alone")]
    if case.dtype == "float32" and axis == 1:  # it knows nothing else
        names.append(("contrib", "alone"))
    found = {name: bench.make(*name, devices, x, dy, axis) for name in names}
    if pytorch.torch and case.contexts == 1:
        found["PyTorch", "alone"] = pytorch.TorchCandidate(x, dy, axis)
    return found


def verify(name, candidate, case, x, dy, axis):
    """Exits unless rounding explains the layer's errors."""
    candidate.step()
    additions = 0
    if name != "gluon_syncbn":
        # Ours adds up in float64. Others add up a channel in float32, and BatchNorm
        # computes on float16 in float16, of which a rounding is 2^13 of float32's.
        float16 = case.dtype == "float16"
        additions = x.size // x.shape[axis] + 2**13 * float16
    # A result is stored once, after eight roundings in float32 and those of sums.
    rounding = 2.0 ** (-11 if case.dtype == "float16" else -24)
    limit = rounding + 8 * (1 + additions) * 2.0**-24
    # On several contexts BatchNorm normalizes each shard by itself.
    parts = case.contexts if name == "BatchNorm" else 1
    error = 0.0
    for part in zip(*(np.split(a, parts) for a in (x, dy, *candidate.results()))):
        for result, right in zip(part[2:], bench.whole_batch(*part[:2], axis)):
            error = max(error, abs(result - right).max() / abs(right).max())
    if not error <= limit:
        sys.exit(f"{name} is wrong by {error:.2g}, over {limit:.2g}: {case}")


def measure(case, seconds):
    """Rows of results, one for each layer, place and direction."""
    before = benchmarking.bandwidth(repetitions=5)
    x, dy, axis = batch_of(case)
    with gluon_syncbn.Devices([mx.cpu(k) for k in range(case.contexts)]) as devices:
        layers = candidates_of(case, devices, x, dy, axis)
        for (name, _), layer in layers.items():
            if name is not None:
                verify(name, layer, case, x, dy, axis)
        begin = time.perf_counter()
        take_turns(layers, 1)
        turns = int(np.clip(seconds / (time.perf_counter() - begin), 3, 150))
        times = take_turns(layers, turns)
    after = benchmarking.bandwidth(repetitions=5)
    bandwidth = max(before, after, key=lambda found: found["copy_gb_s"])
    nothing = times.pop((None, "inside"))
    rows = []
    for (name, place), durations in times.items():
        forward, backward = durations - nothing * (place == "inside")
        parts = {"forward": forward, "backward": backward, "both": forward + backward}
        for direction, part in parts.items():
            rate = PASSES[direction] * x.nbytes / np.median(part) / 1e9
            row = {"layer": name, "place": place, "direction": direction}
            row.update(case._asdict(), shape=list(np.moveaxis(x, axis, 1).shape))
            row.update(benchmarking.statistics(part), gb_s=round(rate, 2), **bandwidth)
            row["share_of_copy"] = round(rate / bandwidth["copy_gb_s"], 3)
            rows.append(row)
    return rows


def take_turns(layers, turns):
    """Seconds of forward and of backward by layer, two of each in a turn."""
    times = {name: [] for name in layers}
    for _ in range(turns):
        for name, layer in layers.items():
            for step in range(3):
                start = time.perf_counter()
                layer.forward()
                middle = time.perf_counter()
                layer.backward()
                if step:
                    times[name].append((middle - start, time.perf_counter() - middle))
    return {name: np.transpose(seconds) for name, seconds in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--seconds", type=float, default=6, help="of timing for a line of the table"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2, 4])
    benchmarking.add_options(parser, "benchmark_sizes")
    options = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        return benchmarking.in_processes(options.contexts, options.output)
    freed_memory = benchmarking.keep_memory(options)
    rows = []
    for case in table():
        if case.size in options.sizes and case.contexts in options.contexts:
            # The contrib layer would hang without a word.
            faulthandler.dump_traceback_later(300, exit=True)
            found = measure(case, options.seconds)
            print(case)
            columns = "layer", "place", "direction", "median_ms", "share_of_copy"
            benchmarking.print_rows(found, *columns)
            rows += found
    document = {"freed_memory": freed_memory, "rows": rows}
    benchmarking.write(options.output, document)


if __name__ == "__main__":
    main()
