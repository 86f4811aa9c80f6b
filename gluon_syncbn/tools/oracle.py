"""A float64 reference of batch normalization in NumPy.

It shares neither code nor the order of formulas with the library.
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


def forward(
    x: Any, gamma: Any, beta: Any, axis: int = 1, eps: float = 1e-5
) -> tuple[np.ndarray, ...]:
    """Compute y = (x - mean) / sqrt(var + eps) * gamma + beta with the moments of `x`.

    Returns
    -------
    y, mean, var, inv_std : float64 arrays; `var` has divisor count (biased).
    """
    x, gamma, beta = (np.asarray(v, np.float64) for v in (x, gamma, beta))
    axes, shape = reduction_axes(x, axis)
    mean = x.mean(axes)
    centered = x - mean.reshape(shape)
    mean += centered.mean(axes)  # the rounding error matters if |mean| >> std
    centered = x - mean.reshape(shape)
    var = np.square(centered).mean(axes)
    inv_std = 1 / np.sqrt(var + eps)
    y = centered * (inv_std * gamma).reshape(shape) + beta.reshape(shape)
    return y, mean, var, inv_std


def backward(
    x: Any, dy: Any, gamma: Any, axis: int = 1, eps: float = 1e-5
) -> tuple[np.ndarray, ...]:
    """Compute the gradients of sum(y * dy) with y = forward(x, gamma, beta).

    Returns
    -------
    dx, dgamma, dbeta : float64 arrays
    """
    dy = np.asarray(dy, np.float64)
    gamma = np.asarray(gamma, np.float64)
    axes, shape = reduction_axes(dy, axis)
    x_hat, _, _, inv_std = forward(
        x, np.ones(gamma.shape), np.zeros(gamma.shape), axis, eps
    )
    dx_hat = dy * gamma.reshape(shape)
    mean_dx_hat = dx_hat.mean(axes).reshape(shape)
    mean_dx_hat_x_hat = (dx_hat * x_hat).mean(axes).reshape(shape)
    dx = inv_std.reshape(shape) * (dx_hat - mean_dx_hat - x_hat * mean_dx_hat_x_hat)
    return dx, (dy * x_hat).sum(axes), dy.sum(axes)
