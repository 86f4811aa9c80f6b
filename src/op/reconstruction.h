// Decides whether a channel's x_hat can be reconstructed from y to about y's precision, so that x
// need not be kept for backward.
// Who uses it: forward.cc. It knows neither devices nor tensors.
#pragma once
#include "core/activation.h"
#include "core/dtype.h"

namespace syncbn {

// For y = f(gamma * x_hat + beta), stored in `dtype`; f is the identity or a leaky ReLU with a
// positive slope.
bool CanReconstruct(double gamma, double beta, const Activation& activation, DType dtype);

}  // namespace syncbn
