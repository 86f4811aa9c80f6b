// The two elementwise passes of the layer, as what happens to one element.
// Who uses it: apply.cuh, which knows where the elements are. Nothing here knows memory layouts.
//
// Coefficients come as double. The part of the mean that the arithmetic cannot hold goes into the
// additive coefficient, so nothing is lost where the mean is far from zero.
// `kUnroll` is how many vectors of each tensor a thread asks for before it uses the first.
#pragma once
#include "kernels/cuda/numeric.h"

namespace syncbn {
namespace cuda {

// y = (x - mean) * scale + offset
template <typename T>
struct NormalizeMap {
  using A = Arithmetic<T>;
  static constexpr int kTensors = 1, kUnroll = 4;
  struct Arguments {
    const T* tensors[1];  // x
    const double *mean, *scale, *offset;
    T* out;
    bool add;
  };
  A mean, scale, offset;

  __device__ void Take(const Arguments& arguments, int64_t channel) {
    const double exact = arguments.mean[channel], by = arguments.scale[channel];
    mean = static_cast<A>(exact);
    scale = static_cast<A>(by);
    offset = static_cast<A>(arguments.offset[channel] - by * (exact - static_cast<double>(mean)));
  }
  __device__ A Of(const T (&x)[1]) const { return (Load(x[0]) - mean) * scale + offset; }
};

// dx = a * dy + b * (x - mean) + d
template <typename T>
struct BackwardMap {
  using A = Arithmetic<T>;
  static constexpr int kTensors = 2, kUnroll = 2;
  struct Arguments {
    const T* tensors[2];  // x, dy
    const double *mean, *a, *b, *d;
    T* out;
    bool add;
  };
  A mean, a, b, d;

  __device__ void Take(const Arguments& arguments, int64_t channel) {
    const double exact = arguments.mean[channel], by = arguments.b[channel];
    mean = static_cast<A>(exact);
    a = static_cast<A>(arguments.a[channel]);
    b = static_cast<A>(by);
    d = static_cast<A>(arguments.d[channel] - by * (exact - static_cast<double>(mean)));
  }
  __device__ A Of(const T (&tensors)[2]) const {
    return a * Load(tensors[1]) + (b * (Load(tensors[0]) - mean) + d);
  }
};

}  // namespace cuda
}  // namespace syncbn
