#include "op/reconstruction.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace syncbn {
namespace {

// The smallest size of y / x_hat, below which digits are lost where |x_hat| is about 1.
double SmallestScale(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
    case DType::kFloat16: return 0x1p-14;  // conversions never flush its subnormal numbers
    default: return std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
  }
}

}  // namespace

bool CanReconstruct(const std::vector<double>& gamma, const std::vector<double>& beta,
                    const Activation& activation, DType dtype) {
  constexpr double kMaxShift = 8;  // of |beta / gamma|: u |x_hat| + 8 u are lost of x_hat
  const bool has_slope = activation.function != Function::kIdentity;
  const double min = SmallestScale(dtype) / (has_slope ? std::min(1.0, activation.slope) : 1.0);
  for (size_t c = 0; c < gamma.size(); ++c) {
    const double size = std::fabs(gamma[c]);
    if (!(size >= min && std::fabs(beta[c]) <= kMaxShift * size)) return false;  // a NaN, too
  }
  return true;
}

}  // namespace syncbn
