"""The float64 oracle of batch normalization, and the tolerances of comparisons."""

from gluon_syncbn.reference import (
    reference_backward,
    reference_forward,
)

import numpy as np

# `python -m gluon_syncbn` also compares with these functions.
forward, backward = reference_forward, reference_backward

IDENTITY = np.ones(3), np.zeros(3)  # gamma and beta of three channels

# Unit roundoff (half of epsilon) and smallest subnormal number of each dtype.
_PRECISION = {
    "float16": (2.0**-11, 2.0**-24),
    "float32": (2.0**-24, 2.0**-149),
    "float64": (2.0**-53, 2.0**-1074),
}


def activate(z, function, slope=0.0):
    z = np.asarray(z, np.float64)
    if function in (None, "identity"):
        return z
    return np.where(z > 0, z, (0.0 if function == "relu" else slope) * z)


def reconstruction_error(dtype, function, largest):
    """Return the largest error of x_hat if backward computes it from y, else 0.

    src/op/sync_batch_norm.cc bounds it by u (largest |x_hat| + 8).
    """
    if function not in ("identity", "leaky_relu"):
        return 0.0
    return _PRECISION[str(dtype)][0] * (largest + 8)


def tolerance(dtype, count=1, conditioning=0.0, scale=1.0):
    """Return rtol and atol: |result - expected| <= atol + rtol |expected|.

    `dtype` is the dtype of the compared array, `count` (n) the number of elements of a
    channel in the whole batch, and `conditioning` the largest |mean| / std of a
    channel. `scale` is the size of the terms from which a result is computed. It is
    max|gamma x_hat| + max|beta| for y, max|gamma inv_std dy| for dx, the sum of the
    absolute terms for sums such as dgamma, and |expected| for a running statistic.

    Let u, u64 and u_out be the unit roundoffs of the arithmetic (float32, or float64
    for float64 data), of float64 and of `dtype`.

    * Storing the result rounds once, by u_out |expected|, or by half a subnormal number
      near zero.
    * The terms of y = (x - mean) * scale + offset and dx = a dy + b (x - mean) + d are
      rounded at most 8 times, including the roundings of their coefficients, so the
      error is at most 8 u times `scale`.
    * Sums are float64. n additions err by at most n u64 times the sum of the absolute
      terms (Higham, Accuracy and Stability of Numerical Algorithms, 2002, eq. 4.4). The
      moments are computed from x - x0, where x0 is a value of x. If |x0 - mean| is at
      most sqrt(3) std, the mean of (x - x0)^2 is at most 4 var. Then the errors of
      mean / std and of inv_std are at most 4 n u64 each. The mean is rounded at most
      twice (on its device, and when means are merged), which adds 2 u64 |mean| / std.
    """
    u_out, subnormal = _PRECISION[str(dtype)]
    u64 = _PRECISION["float64"][0]
    u = u64 if str(dtype) == "float64" else _PRECISION["float32"][0]
    of_terms = 8 * u + 8 * count * u64 + 2 * conditioning * u64
    return u_out, of_terms * scale + subnormal
