// y is rounded by a factor of 1 + u, so z = f^-1(y) errs by u |z|, and x_hat = (z - beta) / gamma by
// u (|x_hat| + |beta / gamma|): no more than a few units of x_hat if |beta| is not much larger than
// |gamma|. And y must not fall among the numbers that the dtype holds with fewer digits, or, float32
// arithmetic being allowed to flush them to zero, not at all.
//
// An ELU approaches -slope, where u slope of y are u / (1 + y / slope) of z: that is allowed to become
// kLargestLoss of x_hat, or as much as the above, and no y may be lower.
#include "op/recovery.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace syncbn {
namespace {

constexpr double kLargestShift = 8;         // of |beta / gamma|: u |x_hat| + 8 u are lost of x_hat
constexpr double kLargestLoss = 0x1p-16;

double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 0x1p-53;
    case DType::kFloat32: return 0x1p-24;
    case DType::kFloat16: return 0x1p-11;
    case DType::kBfloat16: return 0x1p-8;
  }
  return 1;
}

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

std::vector<double> RecoverableFrom(const std::vector<double>& gamma,
                                    const std::vector<double>& beta, const Activation& activation,
                                    DType dtype) {
  const double infinity = std::numeric_limits<double>::infinity(), slope = activation.slope;
  const bool has_slope = activation.function != Function::kIdentity;
  const double least = SmallestScale(dtype) / (has_slope ? std::min(1.0, slope) : 1.0);
  const double units = std::max(kLargestShift, kLargestLoss / UnitRoundoff(dtype));
  std::vector<double> bounds(gamma.size(), infinity);  // what a NaN leaves
  for (size_t c = 0; c < gamma.size(); ++c) {
    const double size = std::fabs(gamma[c]);
    if (!(size >= least && std::fabs(beta[c]) <= kLargestShift * size)) continue;
    bounds[c] = activation.function == Function::kElu ? slope * (1 / (units * size) - 1) : -infinity;
  }
  return bounds;
}

}  // namespace syncbn
