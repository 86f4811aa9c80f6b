// Element types on the device, and vectors of them.
// Who uses it: the kernels of this folder. Arithmetic is float, or double for double data.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "core/host_device.h"

namespace syncbn::cuda {

// The upper half of a float. CUDA's own type converts in hardware from sm_80 on only, and these
// kernels have instructions to spare.
struct Bfloat16 {
  uint16_t bits;
};

template <typename T>
struct Numeric {
  using Arithmetic = float;
};
template <>
struct Numeric<double> {
  using Arithmetic = double;
};
template <typename T>
using Arithmetic = typename Numeric<T>::Arithmetic;

__device__ inline float Load(float value) { return value; }
__device__ inline double Load(double value) { return value; }
__device__ inline float Load(__half value) { return __half2float(value); }
__device__ inline float Load(Bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds to nearest, ties to even.
template <typename T>
__device__ inline T Store(Arithmetic<T> value) {
  return value;
}
template <>
__device__ inline __half Store<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline Bfloat16 Store<Bfloat16>(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return {static_cast<uint16_t>((value != value ? bits | 0x400000 : rounded) >> 16)};
}

// The inverse of Load, for a value that Load gave.
template <typename T>
__device__ inline T Unload(Arithmetic<T> value) {
  return Store<T>(value);
}
template <>
__device__ inline Bfloat16 Unload<Bfloat16>(float value) {
  return {static_cast<uint16_t>(__float_as_uint(value) >> 16)};
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

}  // namespace syncbn::cuda
