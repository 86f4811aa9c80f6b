// y is rounded by a factor of 1 + u, so z = f^-1(y) errs by u |z|, and x_hat = (z - beta) / gamma
// by u (|x_hat| + |beta / gamma|): no more than a few units of x_hat if |beta| is not much larger
// than |gamma|. And y must not fall among the numbers that the dtype holds with fewer digits, or,
// float32 arithmetic being allowed to flush them to zero, not at all.
#include "op/reconstruction.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace syncbn {
namespace {

constexpr double kLargestShift = 8;  // of |beta / gamma|: u |x_hat| + 8 u are lost of x_hat

// The least size of y / x_hat, below which digits are lost where |x_hat| is about 1.
double SmallestScale(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
    case DType::kFloat16: return 0x1p-14;  // conversions never flush its subnormal numbers
    default: return std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
  }
}

}  // namespace

bool CanReconstruct(double gamma, double beta, const Activation& activation, DType dtype) {
  const bool has_slope = activation.function != Function::kIdentity;
  const double least = SmallestScale(dtype) / (has_slope ? std::min(1.0, activation.slope) : 1.0);
  const double size = std::fabs(gamma);
  return size >= least && std::fabs(beta) <= kLargestShift * size;  // false where one is NaN
}

}  // namespace syncbn
