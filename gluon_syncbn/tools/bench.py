"""Times layers beside each other: each is verified first, then they take turns.

Called by ``__main__.py`` (`report`, a few seconds) and by scripts/benchmarks, which
time layers inside of nets and at many sizes. It must not know how a layer computes.
"""

from __future__ import annotations

import itertools
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
# The operators before and after the layer, for its number of channels.
SURROUNDINGS: dict[str, Callable] = {
    "inside": lambda channels: nn.HybridLambda("identity"),
    "convolutions": lambda channels: nn.Conv2D(
        channels, 1, groups=channels, use_bias=False, weight_initializer="ones"
    ),
}
PLACES = *SURROUNDINGS, "alone"
_FASTEST = {"static_alloc": True, "static_shape": True}
# float32, of results about as large as 1.
_BOUND = 1e-4
_NOTES = """\
Medians of {steps} steps, hybridized with static_shape: what a layer adds between two
identities ("inside") and between two cheap convolutions, and the layer called alone.
On two contexts nn.BatchNorm normalizes each half of the batch separately. The contrib
layer is timed on one context only, because on several it can wait forever.
The place decides: between convolutions, where nets have it, nn.BatchNorm keeps oneDNN's
blocked layout, which MXNet converts to a plain one and back for this layer."""


def make(
    name: str | None,
    place: str,
    devices: Devices,
    x: np.ndarray,
    dy: np.ndarray,
    axis: int = 1,
    mode: Mapping | None = _FASTEST,
) -> Candidate:
    """A layer in a place, on a batch; without the layer if `name` is None.

    `mode` has the arguments of `hybridize`, None for an imperative net.
    """
    net, layers = nn.HybridSequential(), []
    if name is not None:
        other_axis = () if axis == 1 else (axis,)  # the contrib layer has none
        layers = [LAYERS[name](len(devices), *other_axis)]
    if place == "alone":
        (net,) = layers
    else:
        before, after = (SURROUNDINGS[place](x.shape[axis]) for _ in range(2))
        net.add(before, *layers, after)
    if mode is not None:
        net.hybridize(**mode)
    return Candidate(net, devices, x, dy)


def added(times: Mapping, name: str, place: str, *others: Any) -> Sequence[float]:
    """The seconds that a layer adds in a place, from times by (name, place, ...)."""
    seconds = times[(name, place, *others)]
    if place == "alone":
        return seconds
    return np.subtract(seconds, times[(None, place, *others)])


def report(contexts: Sequence[mx.Context], shape: tuple = SHAPE) -> None:
    """Prints a table of the milliseconds of forward plus backward.

    Raises WrongResultError if a layer does not equal the reference.
    """
    print(f"forward + backward at {shape}, float32, on {contexts[0].device_type}, ms:")
    print(f"{'':30}{'one context':>14}{'two contexts':>14}")
    x, dy, _ = check.example("float32", shape)
    right, cells = whole_batch(x, dy), {}
    for count in range(1, len(contexts) + 1):
        names = [name for name in LAYERS if count == 1 or name != "contrib"]
        with Devices(contexts[:count]) as devices:
            steps: dict = {
                (None, place): make(None, place, devices, x, dy).step
                for place in SURROUNDINGS
            }
            for place, name in itertools.product(PLACES, names):
                candidate = make(name, place, devices, x, dy)
                verify(name, candidate, count, right)
                steps[name, place] = candidate.step
            times = take_turns(steps, STEPS)
        for place, name in itertools.product(PLACES, names):
            median = np.median(added(times, name, place))
            cells[place, name, count] = f"{1e3 * median:.1f}"
    for place, name in itertools.product(PLACES, LAYERS):
        one, two = (cells.get((place, name, count), "-") for count in (1, 2))
        print(f"{place:16}{name:14}{one:>14}{two:>14}")
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
