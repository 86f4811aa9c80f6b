// Backward from y: whether the normalized input x_hat can be computed from y = f(gamma * x_hat +
// beta), so that x need not be kept.
#pragma once
#include <vector>

#include "core/dtype.h"
#include "kernels/passes.h"

namespace syncbn {

// True if that is possible in every channel, to about y's precision.
//
// y is rounded by a factor of 1 + u, so z = f^-1(y) errs by u |z|, and z - beta = gamma * x_hat by
// u (|z - beta| + |beta|). These are a few units of z - beta if |beta| is not much larger than its
// standard deviation over the batch, `spread`. That is |gamma| sqrt(var / (var + epsilon)), which is
// far below |gamma| in channels that are nearly constant. And y must not fall among the numbers that
// the dtype holds with fewer digits, or, float32 arithmetic being allowed to flush them to zero, not
// at all.
bool CanReconstruct(const std::vector<double>& spread, const std::vector<double>& beta,
                    const Activation& activation, DType dtype);

}  // namespace syncbn
