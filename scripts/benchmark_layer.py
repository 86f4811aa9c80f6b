"""Times the layer against MXNet's own layers, as ratios in one run.

Each candidate is compared with nn.BatchNorm on the whole batch first, and timed only if
it is right. Then all candidates take turns, so that noise of the machine hits all of
them; the medians of a full forward plus backward are printed and written as JSON, with
the memory bandwidth that the same run measured beside them. PyTorch's BatchNorm2d takes
part where PyTorch is installed.

    python scripts/benchmark_layer.py                     # the table of the README
    python scripts/benchmark_layer.py --shape 2,64,30,30 --repetitions 50
"""

import argparse
import faulthandler
import json
import os
import sys
from pathlib import Path

# Before MXNet is imported: an explicit, equal number of threads for everyone.
THREADS = len(os.sched_getaffinity(0))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

import benchmarking  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

import gluon_syncbn  # noqa: E402

MODES = {
    "imperative": None,
    "hybridize": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}
LAYERS = {
    "gluon_syncbn": lambda count: gluon_syncbn.SyncBatchNorm(num_devices=count),
    "BatchNorm": lambda count: gluon.nn.BatchNorm(),
    "contrib": lambda count: gluon.contrib.nn.SyncBatchNorm(num_devices=count),
}


class Candidate:
    """One layer in one graph mode on the shards of one batch."""

    def __init__(self, layer, mode, devices, x, dy):
        self.name, self.mode, self._devices = layer, mode, devices
        self._net = gluon.nn.HybridSequential()
        self._net.add(LAYERS[layer](len(devices)))
        self._net.initialize(ctx=devices.contexts)
        if MODES[mode] is not None:
            self._net.hybridize(**MODES[mode])
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


def whole_batch(x, dy):
    """y and dx of a float64 batch normalization of the whole batch, NCHW."""
    axes = (0, 2, 3)
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
    torch.set_num_threads(THREADS)
    layer = torch.nn.BatchNorm2d(x.shape[1])
    inputs, gradient = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def step():
        inputs.grad = None
        layer(inputs).backward(gradient)

    return step


def measure(shape, counts, modes, repetitions):
    """Rows of results, one for each candidate."""
    rng = np.random.RandomState(0)
    x = rng.normal(3, 2, shape).astype("float32")
    dy = rng.normal(size=shape).astype("float32")
    reference = whole_batch(x, dy)
    rows = []
    for count in counts:
        with gluon_syncbn.Devices([mx.cpu(k) for k in range(count)]) as devices:
            candidates = [
                Candidate(layer, mode, devices, mx.nd.array(x), mx.nd.array(dy))
                for mode in modes
                for layer in LAYERS
            ]
            for candidate in candidates:
                # On several contexts BatchNorm normalizes each shard by itself.
                error = candidate.error(*reference)
                exact = candidate.name != "BatchNorm" or count == 1
                if exact and error > 1e-4:
                    sys.exit(f"{candidate.name} {candidate.mode} is wrong by {error}")
            steps = {(c.name, c.mode): c.step for c in candidates}
            torch = torch_step(x, dy) if count == 1 else None
            if torch is not None:
                steps["PyTorch", "eager"] = torch
            times = benchmarking.interleave(steps, repetitions)
        for (layer, mode), seconds in times.items():
            rows.append(
                {
                    "layer": layer,
                    "mode": mode,
                    "contexts": count,
                    "shape": list(shape),
                    **benchmarking.statistics(seconds),
                }
            )
    return rows


def print_table(rows, bandwidth):
    """Medians and ratios; the bound is eight passes at the copy bandwidth."""
    ours = {
        (r["contexts"], r["mode"]): r["median_ms"]
        for r in rows
        if r["layer"] == "gluon_syncbn"
    }
    passes = 8 * 4 * np.prod(rows[0]["shape"])
    print(f"shape {tuple(rows[0]['shape'])} float32, forward + backward")
    print(
        f"copy {bandwidth['copy_gb_s']:.1f} GB/s, "
        f"read {bandwidth['read_gb_s']:.1f} GB/s; 8 passes at the copy bandwidth: "
        f"{passes / bandwidth['copy_gb_s'] / 1e6:.1f} ms"
    )
    print(f"{'contexts':>8}  {'mode':<13}{'layer':<14}{'median ms':>10}{'ours is':>12}")
    for row in rows:
        mode = "static_shape" if row["mode"] == "eager" else row["mode"]
        ratio = row["median_ms"] / ours[row["contexts"], mode]
        print(
            f"{row['contexts']:>8}  {row['mode']:<13}{row['layer']:<14}"
            f"{row['median_ms']:>10.1f}{ratio:>10.1f} x"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="8,256,60,60", help="N,C,H,W")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / "benchmark_layer.json",
    )
    options = parser.parse_args()
    faulthandler.dump_traceback_later(1500, exit=True)
    shape = tuple(int(size) for size in options.shape.split(","))
    bandwidth = benchmarking.bandwidth()
    rows = measure(shape, options.contexts, options.modes, options.repetitions)
    print_table(rows, bandwidth)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": benchmarking.machine(), "bandwidth": bandwidth, "rows": rows}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
