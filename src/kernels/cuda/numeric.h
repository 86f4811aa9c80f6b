// Element types on the device, and vectors of them. Arithmetic is float, or double for double data.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "core/host_device.h"

namespace syncbn::cuda {

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

// Rounds to nearest, ties to even.
template <typename T>
__device__ inline T Store(Arithmetic<T> value) {
  return value;
}
template <>
__device__ inline __half Store<__half>(float value) {
  return __float2half_rn(value);
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

}  // namespace syncbn::cuda
