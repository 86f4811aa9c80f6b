"""Times layers beside each other: each is verified first, then they take turns.

``__main__.py`` prints `report`, for this machine in a few seconds. The other parts
serve scripts/benchmarks, which time layers inside of nets and at many sizes.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import contrib, nn

from ..devices.devices import Devices
from ..layer.batch_norm import SyncBatchNorm
from . import check
from .check import Candidate

SHAPE = 8, 128, 48, 48
STEPS = 15
LAYERS: dict[str, Callable] = {
    "gluon_syncbn": lambda count, axis=1: SyncBatchNorm(
        num_devices=count, axis=axis, timeout=check.SECONDS
    ),
    "BatchNorm": lambda count, axis=1: nn.BatchNorm(axis=axis),
    "contrib": lambda count: contrib.nn.SyncBatchNorm(num_devices=count),
}
# float32, of results about as large as 1.
_BOUND = 1e-4
_NOTES = """\
Medians of {steps} steps, each layer called alone and hybridized with static_shape.
On two contexts nn.BatchNorm normalizes each half of the batch separately. The contrib
layer is timed on one context only, because on several it can wait forever."""


def report(contexts: Sequence[mx.Context], shape: tuple = SHAPE) -> None:
    """Prints a table of the milliseconds of forward plus backward.

    Raises WrongResultError if a layer does not equal the reference.
    """
    print(f"forward + backward at {shape}, float32, on {contexts[0].device_type}, ms:")
    print(f"{'':24}{'one context':>14}{'two contexts':>14}")
    x, dy, _ = check.example("float32", shape)
    right, times = whole_batch(x, dy), {}
    for count in range(1, len(contexts) + 1):
        with Devices(contexts[:count]) as devices:
            steps = {}
            for name, make in LAYERS.items():
                if count == 1 or name != "contrib":
                    layer = make(count)
                    layer.hybridize(static_alloc=True, static_shape=True)
                    candidate = Candidate(layer, devices, x, dy)
                    verify(name, candidate, count, right)
                    steps[name] = candidate.step
            for name, seconds in take_turns(steps, STEPS).items():
                times[name, count] = f"{1e3 * np.median(seconds):.1f}"
    for name in LAYERS:
        cells = [times.get((name, count), "-") for count in (1, 2)]
        print(f"{name:24}{cells[0]:>14}{cells[1]:>14}")
    print(_NOTES.format(steps=STEPS))


def whole_batch(x: np.ndarray, dy: np.ndarray, axis: int = 1) -> list[np.ndarray]:
    """y and dx of a float64 batch normalization of the whole batch."""
    return list(check.oracle(x, dy, np.ones(x.shape[axis]), axis)[:2])


def verify(name: str, candidate: Candidate, count: int, right: Sequence) -> None:
    """Makes a step; raises WrongResultError unless y and dx are right."""
    candidate.step()
    errors = [abs(a - b).max() for a, b in zip(candidate.results(), right)]
    # On several contexts nn.BatchNorm computes another function.
    if not max(errors) < _BOUND and not (name == "BatchNorm" and count > 1):
        raise check.WrongResultError(
            f"{name} on {count} contexts differs from the float64 reference by "
            f"{max(errors):.2g}, so it is not timed"
        )


def take_turns(
    steps: Mapping[Any, Callable], repetitions: int, warm_up: int = 3
) -> dict[Any, list[float]]:
    """Seconds of each of `steps`; they take turns, so noise affects all equally."""
    times: dict = {name: [] for name in steps}
    for repetition in range(warm_up + repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times
