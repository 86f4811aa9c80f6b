// Emulates CUDA's half precision type, with the rounding of the native tests' tensors.
#pragma once
#include "cuda_runtime.h"
#include "tensor.h"

struct __half {
  uint16_t bits;
};

inline float __half2float(__half value) {
  const int sign = value.bits >> 15, level = value.bits >> 10 & 31, rest = value.bits & 1023;
  double magnitude = std::ldexp(rest + (level > 0 ? 1024 : 0), (level > 0 ? level : 1) - 25);
  if (level == 31) magnitude = rest == 0 ? INFINITY : NAN;
  return static_cast<float>(sign ? -magnitude : magnitude);
}

inline __half __float2half_rn(float value) {
  const double rounded = test::Round(syncbn::DType::kFloat16, value);
  const uint16_t sign = std::signbit(rounded) ? 0x8000 : 0;
  if (std::isnan(rounded)) return {0x7e00};
  if (std::isinf(rounded)) return {static_cast<uint16_t>(sign | 0x7c00)};
  const double ulp = test::Ulp(syncbn::DType::kFloat16, rounded);
  const int level = std::ilogb(ulp) + 24;
  return {static_cast<uint16_t>(sign + (level << 10) + static_cast<int>(std::fabs(rounded) / ulp))};
}
