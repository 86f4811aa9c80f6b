#include "op/reconstruction.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace syncbn {
namespace {

// The smallest spread of y without a loss of digits.
double SmallestSpread(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
    case DType::kFloat16: return 0x1p-14;  // conversions never flush its subnormal numbers
    default: return std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
  }
}

}  // namespace

bool CanReconstruct(const std::vector<double>& spread, const std::vector<double>& beta,
                    const Activation& activation, DType dtype) {
  constexpr double kMaxShift = 8;  // |beta| / spread: a spread errs by 8 u and its own rounding
  const bool has_slope = activation.function != Function::kIdentity;
  const double min = SmallestSpread(dtype) / (has_slope ? std::min(1.0, activation.slope) : 1.0);
  for (size_t c = 0; c < spread.size(); ++c) {
    const bool suffices = spread[c] >= min && std::fabs(beta[c]) <= kMaxShift * spread[c];
    if (!suffices) return false;  // also for a NaN
  }
  return true;
}

}  // namespace syncbn
