// Emulates CUDA's half precision type by the conversions of tensor.h.
#pragma once
#include "cuda_runtime.h"
#include "tensor.h"

struct __half {
  uint16_t bits;
};

inline float __half2float(__half value) {
  return static_cast<float>(test::EveryFloat16()[value.bits]);
}
inline __half __float2half_rn(float value) { return {test::ToFloat16(value)}; }
