"""Compare the layer on several contexts with one float64 batch normalization in NumPy.

``oracle.py`` computes the latter.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from ..layer.batch_norm import SyncBatchNorm
from ..mxnet_private.library import array_of
from ..parallel.devices import Devices
from .oracle import backward, forward

SHAPE = 7, 6, 9, 10  # seven rows on two contexts: their shards differ
MODES = "imperative", "hybridized"
DTYPES = "float32", "float64"
MOMENTUM = 0.9
TIMEOUT = 60  # seconds
# In units of the dtype's epsilon, of the largest value: rounding stays far below, and
# statistics of one device alone would be off by a large part of the value.
_BOUND = 100


class WrongResultError(Exception):
    """A result differs from the reference by more than rounding explains."""


def check(contexts: Sequence[mx.Context], mode: str, dtype: Any) -> tuple[float, float]:
    """Return the largest error of a training step on shards, and the allowed error.

    Both are relative to the largest value of a result. Raise WrongResultError, which
    names the first wrong result.
    """
    x, dy, gamma = example(dtype)
    layer = SyncBatchNorm(num_devices=len(contexts), timeout=TIMEOUT)
    results = step(layer, contexts, mode, (x, dy, gamma))
    place = f"on {' and '.join(map(str, contexts))}, {mode}, {dtype}"
    bound, worst = _BOUND * float(np.finfo(dtype).eps), 0.0
    for (name, result), expected in zip(results.items(), oracle(x, dy, gamma)):
        # A NaN has to be wrong too, so nothing is compared with "greater".
        error = abs(result - expected).max() / abs(expected).max()
        if not error <= bound:
            raise WrongResultError(
                f"{name} is wrong {place}: it differs from the float64 reference by "
                f"{error:.2g} of the largest value, expected {bound:.2g} at most"
            )
        worst = max(worst, error)
    return worst, bound


def example(dtype: Any, shape: tuple = SHAPE) -> list[np.ndarray]:
    """Return x, dy and gamma; means and deviations differ by channel and by row."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, shape) + rng.normal(0, 4, (shape[0], shape[1], 1, 1))
    return [
        array.astype(dtype)
        for array in (x, rng.normal(size=shape), rng.uniform(0.5, 2, shape[1]))
    ]


class Candidate:
    """A net on the shards of a batch; one device is driven without its thread."""

    def __init__(
        self, net: mx.gluon.Block, devices: Devices, x: np.ndarray, dy: np.ndarray
    ) -> None:
        net.cast(x.dtype)
        net.initialize(ctx=devices.contexts)
        self._net: Callable = net
        self._map: Callable = devices.map
        if len(devices) == 1:
            self._map = lambda function, *lists: [function(*e) for e in zip(*lists)]
        self._xs, self._dys = devices.split(x), devices.split(dy)
        for shard in self._xs:
            shard.attach_grad()

    def step(self) -> None:
        """Run forward and backward, and wait for the results."""
        with mx.autograd.record():
            self._ys = self._map(self._net, self._xs)
        self._map(lambda y, dy: y.backward(dy), self._ys, self._dys)
        mx.nd.waitall()

    def results(self) -> list[np.ndarray]:
        """Return y and dx of the last step, for the whole batch."""
        dxs = [shard.grad for shard in self._xs]
        return [np.concatenate([a.asnumpy() for a in part]) for part in (self._ys, dxs)]


def step(
    layer: Any, contexts: Sequence[mx.Context], mode: str, arrays: Sequence
) -> dict[str, np.ndarray]:
    """Run forward and backward on the shards; return NumPy arrays by name."""
    x, dy, gamma = arrays
    if mode == "hybridized":
        layer.hybridize(static_alloc=True, static_shape=True)
    devices = Devices(contexts)
    candidate = Candidate(layer, devices, x, dy)
    layer.gamma.set_data(array_of(gamma, contexts[0]))
    candidate.step()
    y, dx = candidate.results()
    return {
        "y": y,
        "dx": dx,
        "dgamma": sum(grad.asnumpy() for grad in layer.gamma.list_grad()),
        "dbeta": sum(grad.asnumpy() for grad in layer.beta.list_grad()),
        "the running mean": layer.running_mean.list_data()[-1].asnumpy(),
        "the running variance": layer.running_var.list_data()[-1].asnumpy(),
    }


def oracle(
    x: np.ndarray, dy: np.ndarray, gamma: np.ndarray, axis: int = 1
) -> tuple[np.ndarray, ...]:
    """Return the arrays of `step` for the whole batch in float64, with beta 0."""
    y, mean, var, _ = forward(x, gamma, np.zeros(gamma.shape), axis)
    running = (1 - MOMENTUM) * mean, MOMENTUM + (1 - MOMENTUM) * var
    return (y, *backward(x, dy, gamma, axis), *running)
