// Backward from y: whether the normalized input x_hat can be computed from y = f(gamma * x_hat +
// beta), so that x need not be kept.
#pragma once
#include <vector>

#include "core/dtype.h"
#include "kernels/passes.h"

namespace syncbn {

// True if that is possible in every channel, to about y's precision.
//
// y is rounded by a factor of 1 + u, so z = f^-1(y) errs by u |z|, and x_hat = (z - beta) / gamma
// by u (|x_hat| + |beta / gamma|): no more than a few units of x_hat if |beta| is not much larger
// than |gamma|. And y must not fall among the numbers that the dtype holds with fewer digits, or,
// float32 arithmetic being allowed to flush them to zero, not at all.
bool CanReconstruct(const std::vector<double>& gamma, const std::vector<double>& beta,
                    const Activation& activation, DType dtype);

}  // namespace syncbn
