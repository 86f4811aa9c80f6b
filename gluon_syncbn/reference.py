"""Batch normalization of a whole batch in NumPy and float64, as in the paper.

It shares neither code nor order of operations with src.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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
