"""Find the devices of this machine, and compare the layer with NumPy in float64."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Sequence

import mxnet as mx
import numpy as np

from .layer.batch_norm import SyncBatchNorm
from .mxnet_private.arrays import array_of
from .parallel.net import make_parallel

# A child process counts the GPUs, because counting starts CUDA, and a process that is
# forked after CUDA has started, such as a worker of a DataLoader, cannot use CUDA.
_COUNT_GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
    raise SystemExit(1)
print(count.value)
"""


def available_contexts() -> list[mx.Context]:
    """Return the contexts of all GPUs, or the CPU, for :func:`make_parallel`.

    It creates no CUDA context, allocates no device memory and does not start CUDA in
    this process. It respects ``CUDA_VISIBLE_DEVICES``.

    Returns
    -------
    list of mxnet.Context
        ``[gpu(0), gpu(1), ...]``, or ``[cpu(0)]`` if there is no GPU or MXNet was built
        without CUDA.

    Examples
    --------
    >>> from gluon_syncbn import available_contexts
    >>> contexts = available_contexts()
    """
    if not mx.runtime.Features().is_enabled("CUDA"):
        return [mx.cpu(0)]
    command = [sys.executable, "-c", _COUNT_GPUS]
    # The child fails if there is no driver or no device.
    found = subprocess.run(command, capture_output=True, timeout=60, check=False)
    count = int(found.stdout) if found.returncode == 0 else 0
    return [mx.gpu(k) for k in range(count)] or [mx.cpu(0)]


# ---- Training steps of the layer, compared with the reference.


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


# ---- The reference, which shares neither code nor order of operations with src.


def reduction_axes(x: np.ndarray, axis: int) -> tuple[tuple[int, ...], list[int]]:
    """Return all axes but `axis`, and the shape that broadcasts a channel vector."""
    axis = axis % x.ndim
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return tuple(i for i in range(x.ndim) if i != axis), shape


def reference_forward(
    x: Any, gamma: Any, beta: Any, axis: int = 1, eps: float = 1e-5
) -> tuple[np.ndarray, ...]:
    """Compute y = (x - mean) / sqrt(var + eps) * gamma + beta with the moments of `x`.

    Return y, mean, the biased var, and 1 / sqrt(var + eps), all in float64.
    """
    x, gamma, beta = (np.asarray(v, np.float64) for v in (x, gamma, beta))
    axes, shape = reduction_axes(x, axis)
    mean = x.mean(axes)
    centered = x - mean.reshape(shape)
    mean += centered.mean(axes)  # removes rounding error if |mean| >> std
    centered = x - mean.reshape(shape)
    var = np.square(centered).mean(axes)
    inv_std = 1 / np.sqrt(var + eps)
    y = centered * (inv_std * gamma).reshape(shape) + beta.reshape(shape)
    return y, mean, var, inv_std


def reference_backward(
    x: Any, dy: Any, gamma: Any, axis: int = 1, eps: float = 1e-5
) -> tuple[np.ndarray, ...]:
    """Return dx, dgamma and dbeta, the gradients of sum(y * dy), in float64."""
    dy, gamma = np.asarray(dy, np.float64), np.asarray(gamma, np.float64)
    axes, shape = reduction_axes(dy, axis)
    ones, zeros = np.ones(gamma.shape), np.zeros(gamma.shape)
    x_hat, _, _, inv_std = reference_forward(x, ones, zeros, axis, eps)
    dx_hat = dy * gamma.reshape(shape)
    mean_dx_hat = dx_hat.mean(axes).reshape(shape)
    mean_dx_hat_x_hat = (dx_hat * x_hat).mean(axes).reshape(shape)
    dx = inv_std.reshape(shape) * (dx_hat - mean_dx_hat - x_hat * mean_dx_hat_x_hat)
    return dx, (dy * x_hat).sum(axes), dy.sum(axes)
