"""The float64 oracle: batch normalization of the whole batch in one array.

All tests compare with it. `forward` and `backward` also serve the check command; other
functions and all tolerances are here.
"""

from gluon_syncbn.installation import (
    reduction_axes,
    reference_backward,
    reference_forward,
)

import numpy as np

forward, backward = reference_forward, reference_backward

# Unit roundoff (half of epsilon) and smallest subnormal number of each dtype.
_PRECISION = {
    "float16": (2.0**-11, 2.0**-24),
    "float32": (2.0**-24, 2.0**-149),
    "float64": (2.0**-53, 2.0**-1074),
}


def activate(z, function, slope=0.0):
    """f(z): "identity", "relu" or "leaky_relu" (slope z for z <= 0)."""
    z = np.asarray(z, np.float64)
    if function in (None, "identity"):
        return z
    return np.where(z > 0, z, (0.0 if function == "relu" else slope) * z)


def reconstruction_error(dtype, function, x_hat):
    """Return the largest error of an x_hat that is reconstructed from a stored y.

    `x_hat` is the largest one, and y is stored in `dtype`. src/op/sync_batch_norm.cc
    reconstructs x_hat for "identity" and "leaky_relu", and u (|x_hat| + 8) bounds the
    error.
    """
    if function not in ("identity", "leaky_relu"):
        return 0.0
    return _PRECISION[str(dtype)][0] * (x_hat + 8)


def inference_forward(x, gamma, beta, running_mean, running_var, axis=1, eps=1e-5):
    """y = (x - running_mean) / sqrt(running_var + eps) * gamma + beta."""
    x = np.asarray(x, np.float64)
    _, shape = reduction_axes(x, axis)
    mean, var, gamma, beta = (
        np.asarray(v, np.float64).reshape(shape)
        for v in (running_mean, running_var, gamma, beta)
    )
    return (x - mean) / np.sqrt(var + eps) * gamma + beta


def tolerance(dtype, count=1, conditioning=0.0, scale=1.0):
    r"""Return bounds of a right result: |result - expected| <= atol + rtol |expected|.

    Parameters
    ----------
    dtype : what the compared array is stored in ("float16", "float32", "float64").
    count : elements of one channel in the whole batch.
    conditioning : the largest |mean| / std of all channels.
    scale : size of the largest terms that are added to give the result. For y that is
        max|gamma x_hat| + max|beta|; for dx, max|gamma inv_std dy|; for sums such as
        dgamma and dbeta, the sum of the absolute terms; for a running statistic, its
        own size.

    Returns
    -------
    rtol, atol

    Notes
    -----
    Let u be the unit roundoff of the arithmetic (float32, or float64 for float64 data),
    u64 the one of float64 and u_out the one of `dtype`.

    * Storing the result rounds once: u_out |expected|, or half a subnormal number near
      zero.
    * Elementwise, y = (x - mean) * scale + offset and dx = a dy + b (x - mean) + d are
      at most three products, three sums and four coefficients that were rounded to the
      arithmetic's precision: 8 roundings on the way of any one term bound the first-
      order error by 8 u times the terms.
    * Sums are float64: n additions err by at most n u64 relative to the terms' absolute
      sum (Higham, Accuracy and Stability of Numerical Algorithms, 2002, eq. 4.4). About
      a shift among the data, the moments lose another factor 4 at most; so mean / std
      and inv_std err by 4 n u64, and the rounding of the mean itself by u64 |mean| /
      std. Relative to the terms of a result that uses both, this is 8 n u64 + 2 u64
      |mean| / std.
    """
    u_out, subnormal = _PRECISION[str(dtype)]
    u64 = _PRECISION["float64"][0]
    u = u64 if str(dtype) == "float64" else _PRECISION["float32"][0]
    of_terms = 8 * u + 8 * count * u64 + 2 * conditioning * u64
    return u_out, of_terms * scale + subnormal
