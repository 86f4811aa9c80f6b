"""Compare training steps of the layer with batch normalization in float64."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
import numpy as np

from .layer.batch_norm import SyncBatchNorm
from .mxnet_private.arrays import array_of
from .parallel.make_parallel import make_parallel
from .reference import reference_backward, reference_forward


def check(contexts: Sequence[mx.Context], mode: str, dtype: str) -> dict[str, float]:
    """Return the error of each result, relative to its largest value."""
    rng = np.random.default_rng(0)
    shape = 7, 6, 9, 10  # seven rows split unevenly over two contexts
    # Each row of each channel has its own mean, so the shards' statistics differ.
    x = rng.normal(3, 2, shape) + rng.normal(0, 4, (*shape[:2], 1, 1))
    arrays = x, rng.normal(size=shape), rng.uniform(0.5, 2, shape[1])
    x, dy, gamma = (array.astype(dtype) for array in arrays)
    results = step(contexts, mode, x, dy, gamma)
    y, mean, var, _ = reference_forward(x, gamma, np.zeros(gamma.shape))
    running = 0.1 * mean, 0.9 + 0.1 * var
    expected_results = y, *reference_backward(x, dy, gamma), *running
    return {
        name: float(abs(result - expected).max() / abs(expected).max())
        for (name, result), expected in zip(results.items(), expected_results)
    }


def step(
    contexts: Sequence[mx.Context], mode: str, *arrays: np.ndarray
) -> dict[str, np.ndarray]:
    """Run forward and backward of a layer; return the results by name."""
    x, dy, gamma = (array_of(array, contexts[0]) for array in arrays)
    layer = make_parallel(SyncBatchNorm(timeout=60), contexts, sync_bn=False)
    if mode == "hybridized":
        layer.hybridize(static_alloc=True, static_shape=True)
    layer.cast(x.dtype)
    layer.initialize()
    layer.gamma.set_data(gamma)
    x.attach_grad()
    with mx.autograd.record():
        y = layer(x)
    y.backward(dy)
    results = {
        "y": y,
        "dx": x.grad,
        "dgamma": layer.gamma.grad(),
        "dbeta": layer.beta.grad(),
        "the running mean": layer.running_mean.list_data()[-1],
        "the running variance": layer.running_var.list_data()[-1],
    }
    return {name: result.asnumpy() for name, result in results.items()}
