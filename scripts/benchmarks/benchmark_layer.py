"""Times the layer against MXNet's own layers, as ratios in one run.

Three places are timed, forward plus backward. "inside": what a layer adds to a net,
that is a net of two identities with the layer between them, less the same net without
it, pair by pair. "convolutions": the same with convolutions that compute the identity,
by one weight for each channel; what they exchange with nn.BatchNorm is in a layout of
oneDNN's, and for custom operators MXNet makes it plain and back. "alone": the layer is
called by itself.

Each candidate is compared with a float64 batch normalization of the whole batch first,
and timed only if it is right. Then all candidates take turns, so that noise of the
machine hits all of them; medians are printed and written as JSON, with the memory
bandwidth that the run on one context measured. PyTorch's BatchNorm2d takes part where
PyTorch is installed.

    python scripts/benchmarks/benchmark_layer.py  # as in docs/benchmarks.md
    python scripts/benchmarks/benchmark_layer.py --shape 2,64,30,30 --repetitions 50

benchmark_sizes.py times forward and backward at many sizes.
"""

import argparse
import faulthandler
import itertools
import os
import sys
from pathlib import Path

import benchmarking
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import gluon_syncbn

MODES = list(benchmarking.MODES)
LAYERS = {
    "gluon_syncbn": lambda count: gluon_syncbn.SyncBatchNorm(num_devices=count),
    "BatchNorm": lambda count: gluon.nn.BatchNorm(),
    "contrib": lambda count: gluon.contrib.nn.SyncBatchNorm(num_devices=count),
}


class Identity(gluon.HybridBlock):
    """Copies its input."""

    def hybrid_forward(self, F, x):
        return F.identity(x)


def convolution(channels):
    """A cheap convolution that changes nothing."""
    return gluon.nn.Conv2D(
        channels, 1, groups=channels, use_bias=False, weight_initializer="ones"
    )


# The operators before and behind the layer, for its number of channels.
SURROUNDINGS = {"inside": lambda channels: Identity(), "convolutions": convolution}


class Candidate:
    """One layer in one graph mode on the shards of one batch; None is no layer."""

    def __init__(self, layer, place, mode, devices, x, dy):
        self._devices = devices
        between = [] if layer is None else [LAYERS[layer](len(devices))]
        if place == "alone":
            (self._net,) = between
        else:
            before, behind = (SURROUNDINGS[place](x.shape[1]) for _ in range(2))
            self._net = gluon.nn.HybridSequential()
            self._net.add(before, *between, behind)
        self._net.initialize(ctx=devices.contexts)
        benchmarking.set_mode(self._net, mode)
        self._xs, self._dys = devices.split(x), devices.split(dy)
        for shard in self._xs:
            shard.attach_grad()

    def step(self):
        """Forward and backward, from calls to finished arrays."""
        with autograd.record():
            ys = self._devices.map(self._net, self._xs)
        self._devices.map(lambda y, dy: y.backward(dy), ys, self._dys)
        mx.nd.waitall()
        return ys

    def error(self, y, dx):
        """Largest differences from a whole-batch y and dx."""
        ys = self.step()
        return max(
            abs(np.concatenate([shard.asnumpy() for shard in ys]) - y).max(),
            abs(np.concatenate([s.grad.asnumpy() for s in self._xs]) - dx).max(),
        )


def whole_batch(x, dy, axis=1):
    """y and dx of a float64 batch normalization of the whole batch."""
    axes = tuple(k for k in range(x.ndim) if k != axis)
    x, dy = x.astype("float64"), dy.astype("float64")
    inv_std = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    x_hat = (x - x.mean(axes, keepdims=True)) * inv_std
    dx = dy - dy.mean(axes, keepdims=True)
    dx -= x_hat * (dy * x_hat).mean(axes, keepdims=True)
    return x_hat, dx * inv_std


def torch_step(x, dy):
    """A closure that times PyTorch's layer, or None where PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    layer = torch.nn.BatchNorm2d(x.shape[1])
    inputs, gradient = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def step():
        inputs.grad = None
        layer(inputs).backward(gradient)

    return step


def verified_steps(devices, modes, x, dy):
    """Functions to time by (layer, place, mode), all of which are right."""
    reference = whole_batch(x, dy)
    x, dy = mx.nd.array(x), mx.nd.array(dy)
    steps = {}
    for mode in modes:
        for place in SURROUNDINGS:
            nothing = Candidate(None, place, mode, devices, x, dy)
            steps[None, place, mode] = nothing.step
        for layer, place in itertools.product(LAYERS, (*SURROUNDINGS, "alone")):
            candidate = Candidate(layer, place, mode, devices, x, dy)
            error = candidate.error(*reference)
            # On several contexts BatchNorm normalizes each shard by itself.
            if error > 1e-4 and not (layer == "BatchNorm" and len(devices) > 1):
                sys.exit(f"{layer} {place} {mode} is wrong by {error}")
            steps[layer, place, mode] = candidate.step
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
            torch = torch_step(x, dy) if count == 1 else None
            if torch is not None:
                steps["PyTorch", "alone", "eager"] = torch
            times = benchmarking.interleave(steps, repetitions)
        for (layer, place, mode), seconds in times.items():
            if layer is None:
                continue
            if place != "alone":
                seconds = np.subtract(seconds, times[None, place, mode])
            row = {"layer": layer, "place": place, "mode": mode, "contexts": count}
            row.update(benchmarking.statistics(seconds), shape=list(shape))
            rows.append(row)
    return rows


def print_table(rows, bandwidth):
    """Medians and ratios; the bound is eight passes at the copy bandwidth."""
    ours = {
        (row["contexts"], row["place"], row["mode"]): row["median_ms"]
        for row in rows
        if row["layer"] == "gluon_syncbn"
    }
    passes = 8 * 4 * np.prod(rows[0]["shape"])
    print(f"shape {tuple(rows[0]['shape'])} float32, forward + backward")
    print(
        f"copy {bandwidth['copy_gb_s']:.1f} GB/s, "
        f"read {bandwidth['read_gb_s']:.1f} GB/s; 8 passes at the copy bandwidth: "
        f"{passes / bandwidth['copy_gb_s'] / 1e6:.1f} ms"
    )
    line = "{:>8}  {:<14}{:<14}{:<14}{:>10}{:>14}"
    print(line.format("contexts", "place", "mode", "layer", "median ms", "to ours"))
    for row in rows:
        mode = "static_shape" if row["mode"] == "eager" else row["mode"]
        ratio = row["median_ms"] / ours[row["contexts"], row["place"], mode]
        cells = [row[key] for key in ("contexts", "place", "mode", "layer")]
        print(line.format(*cells, f"{row['median_ms']:.1f}", f"{ratio:.2f} x"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="8,256,60,60", help="N,C,H,W")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parents[1] / "results" / "benchmark_layer.json",
    )
    benchmarking.add_memory_option(parser)
    options = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        return benchmarking.in_processes(options.contexts, options.output)
    freed_memory = benchmarking.keep_memory(options)
    faulthandler.dump_traceback_later(1500, exit=True)
    shape = tuple(int(size) for size in options.shape.split(","))
    bandwidth = benchmarking.bandwidth()
    rows = measure(shape, options.contexts, options.modes, options.repetitions)
    print_table(rows, bandwidth)
    document = {"machine": benchmarking.machine(), "freed_memory": freed_memory}
    document.update(bandwidth=bandwidth, rows=rows)
    benchmarking.write(options.output, document)


if __name__ == "__main__":
    main()
