// Which channels' inputs can be recovered from the layer's output, so that x need not be kept.
// Who uses it: sync_batch_norm.cc.
#pragma once
#include <cstdint>
#include <vector>

#include "core/activation.h"
#include "core/dtype.h"

namespace syncbn {

// Of y = f(gamma * x_hat + beta), stored in `dtype`: per channel a bound below which no y may be for
// x_hat to be had from y about as exactly as y itself is. Infinite: x_hat cannot be had from any y.
std::vector<double> RecoverableFrom(const std::vector<double>& gamma,
                                    const std::vector<double>& beta, const Activation& activation,
                                    DType dtype);

}  // namespace syncbn
