// The two passes that write a tensor, as the work on one element. Nothing here knows memory
// layouts.
//
// `kUnroll` is how many vectors of each tensor a thread asks for before it uses the first: fewer
// where the coefficients of several columns fill the registers.
#pragma once
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/numeric.h"

namespace syncbn::cuda {

template <typename T>
struct NormalizeArguments {
  const T* tensors[1];  // x
  const double *mean, *scale, *offset;
  Slopes<Arithmetic<T>> f;
  T* out;
  bool add;
};

// y = f((x - mean) * scale + offset)
template <typename T, Variant kVariant>
struct NormalizeMap {
  using A = Arithmetic<T>;
  static constexpr bool kFused = false;
  static constexpr int kTensors = 1, kUnroll = 4;
  using Arguments = NormalizeArguments<T>;
  Affine<A> to_z;

  __device__ void Take(const Arguments& arguments, int64_t channel) {
    to_z = MakeAffine<A>(arguments.mean[channel], arguments.scale[channel],
                         arguments.offset[channel]);
  }
  __device__ A Of(const T (&x)[1], const Slopes<A>& f) const {
    return Activate<kVariant>(to_z.Of(Load(x[0])), f);
  }
};

template <typename T>
struct BackwardArguments {
  const T* tensors[2];  // saved, dy
  Unwinding by;
  const double *a, *b, *d;
  Slopes<Arithmetic<T>> f;
  T* out;
  bool add;
};

// dx = a * dz + b * xmu + d
template <typename T, Variant kVariant>
struct BackwardMap {
  using A = Arithmetic<T>;
  static constexpr bool kFused = kVariant != kPlain;
  static constexpr int kTensors = 2, kUnroll = kFused && sizeof(T) == 8 ? 1 : 2;
  using Arguments = BackwardArguments<T>;
  A a, unit;
  Affine<A> of_centered;  // b * xmu + d, as scale * (unit * centered) + offset
  Affine<A> to_z;

  __device__ void Take(const Arguments& arguments, int64_t channel) {
    a = static_cast<A>(arguments.a[channel]);
    const double scale = PerScale(arguments.b[channel], arguments.by, channel);
    const double power = HalfOfExponent(scale);
    of_centered =
        MakeAffine<A>(arguments.by.center[channel], scale, arguments.d[channel]);
    of_centered.scale = static_cast<A>(scale / power);
    unit = static_cast<A>(power);
    to_z = AffineToUnwind<kVariant, A>(arguments.by, channel);
  }
  __device__ A Of(const T (&tensors)[2], const Slopes<A>& f) const {
    A centered, dz;
    Unwind<kVariant>(Load(tensors[0]), Load(tensors[1]), to_z, f, &centered, &dz);
    return a * dz + (of_centered.scale * (unit * centered) + of_centered.offset);
  }
};

}  // namespace syncbn::cuda
