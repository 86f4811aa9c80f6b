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
  const double *scale_xmu, *shift;
  Slopes<Arithmetic<T>> f;
  T* out;
  bool add;
};

// dx = scale * dz + scale_xmu * xmu + shift
template <typename T, Variant kVariant>
struct BackwardMap {
  using A = Arithmetic<T>;
  static constexpr bool kFused = kVariant != kPlain;
  static constexpr int kTensors = 2, kUnroll = kFused && sizeof(T) == 8 ? 1 : 2;
  using Arguments = BackwardArguments<T>;
  A scale_dz, unit;
  Affine<A> of_centered;  // scale_xmu * xmu + shift, as scale * (unit * centered) + offset
  Affine<A> to_z;

  __device__ void Take(const Arguments& arguments, int64_t channel) {
    scale_dz = static_cast<A>(arguments.by.scale[channel]);
    const double scale = PerScale(arguments.scale_xmu[channel], arguments.by, channel);
    of_centered = MakeAffine<A>(arguments.by.center[channel], scale, arguments.shift[channel]);
    double power;
    of_centered.scale = static_cast<A>(SplitCoefficient(scale, &power));
    unit = static_cast<A>(power);
    to_z = AffineToUnwind<kVariant, A>(arguments.by, channel);
  }
  __device__ A Of(const T (&tensors)[2], const Slopes<A>& f) const {
    A centered, dz;
    Unwind<kVariant>(Load(tensors[0]), Load(tensors[1]), to_z, f, &centered, &dz);
    return scale_dz * dz + (of_centered.scale * (unit * centered) + of_centered.offset);
  }
};

}  // namespace syncbn::cuda
