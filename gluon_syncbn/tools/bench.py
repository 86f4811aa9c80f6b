"""Times the layer beside MXNet's own on this machine, in a few seconds.

Called by ``__main__.py``. Each candidate is compared with the float64 reference before
it is timed. ``scripts/benchmarks/benchmark_layer.py`` measures inside of nets.
"""

from __future__ import annotations

import time
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import contrib, nn

from ..devices.devices import Devices
from ..layer.batch_norm import SyncBatchNorm
from . import check

SHAPE = 8, 128, 48, 48
STEPS, WARM_UP = 15, 3
OURS, PLAIN, CONTRIB = "SyncBatchNorm", "nn.BatchNorm", "contrib SyncBatchNorm"
_NOTES = """\
Medians of {steps} steps, each layer called by itself and hybridized with static_shape.
On two contexts nn.BatchNorm normalizes each half of the batch by itself. The contrib
layer is timed on one context only, because on several it can wait for ever."""


def report(contexts: Sequence[mx.Context], shape: tuple = SHAPE) -> None:
    """Prints a table of the milliseconds of forward plus backward.

    Raises WrongResultError if a layer does not equal the reference.
    """
    print(f"forward + backward at {shape}, float32, on {contexts[0].device_type}, ms:")
    print(f"{'':24}{'one context':>14}{'two contexts':>14}")
    makers = {
        OURS: lambda count: SyncBatchNorm(num_devices=count, timeout=check.SECONDS),
        PLAIN: lambda count: nn.BatchNorm(),
        CONTRIB: lambda count: contrib.nn.SyncBatchNorm(num_devices=count),
    }
    arrays = check.example("float32", shape)
    times = {}
    for count in range(1, len(contexts) + 1):
        layers = {
            name: make(count)
            for name, make in makers.items()
            if count == 1 or name != CONTRIB
        }
        for name, layer in layers.items():
            _verify(name, layer, contexts[:count], arrays)
        for name, ms in _take_turns(layers, contexts[:count], arrays).items():
            times[name, count] = f"{ms:.1f}"
    for name in makers:
        cells = [times.get((name, count), "-") for count in (1, 2)]
        print(f"{name:24}{cells[0]:>14}{cells[1]:>14}")
    print(_NOTES.format(steps=STEPS))


def _verify(name, layer, contexts, arrays):
    y, dx, *_ = check.step(layer, contexts, "hybridized", arrays).values()
    expected, dx_expected, *_ = check.oracle(*arrays)
    error = max(abs(y - expected).max(), abs(dx - dx_expected).max())
    # nn.BatchNorm computes another function on two contexts.
    if not error < 1e-3 and not (name == PLAIN and len(contexts) > 1):
        raise check.WrongResultError(
            f"{name} on {len(contexts)} contexts differs from the float64 reference by "
            f"{error:.2g}, so it is not timed"
        )


def _take_turns(layers, contexts, arrays):
    """Median milliseconds by name; noise of the machine hits all layers alike."""
    seconds = {name: [] for name in layers}
    with Devices(contexts) as devices:
        xs, dys = (devices.split(array) for array in arrays[:2])
        for shard in xs:
            shard.attach_grad()
        for turn in range(WARM_UP + STEPS):
            for name, layer in layers.items():
                begin = time.perf_counter()
                with mx.autograd.record():
                    ys = devices.map(layer, xs)
                devices.map(lambda y, dy: y.backward(dy), ys, dys)
                mx.nd.waitall()
                if turn >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begin)
    return {name: 1e3 * float(np.median(times)) for name, times in seconds.items()}
