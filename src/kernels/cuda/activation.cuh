// The activation, forward and backward, for one element: the mirror of cpu/tile_activation.inl.
// Who uses it: maps.cuh, sums.cuh and batch_norm.cuh. Nothing here knows memory layouts.
//
// A kernel has one instance without an activation and one for all of them, because an instance for
// each would take twice as long to compile. In the latter the kind is an argument, on which all
// threads agree: a branch for each vector of elements, and none for an element.
#pragma once
#include <cmath>
#include <cstdint>

#include "core/activation.h"
#include "kernels/cuda/numeric.h"

namespace syncbn {
namespace cuda {

// What a pass does with the element t that it reads.
enum Kind {
  kPlain,     // no activation; a backward pass reads x, or y of the identity
  kLeakyOfX,  // forward, or backward from x
  kLeakyOfY,  // backward from y
  kEluOfX,    // forward, or backward from x
};

__host__ __device__ constexpr bool ReadsX(Kind kind) {
  return kind == kLeakyOfX || kind == kEluOfX;
}

inline Kind KindOf(const Activation& activation, bool from_output) {
  if (activation.function == Function::kElu) return kEluOfX;
  if (activation.function != Function::kLeakyRelu) return kPlain;
  return from_output ? kLeakyOfY : kLeakyOfX;
}

template <Kind kKind>
struct KindConstant {
  static constexpr Kind value = kKind;
};

// The kinds of one instance.
template <Kind... kKinds>
struct Kinds {
  static constexpr bool kFused = sizeof...(kKinds) > 1;

  // Calls run(constant of `kind`).
  template <typename Run>
  __device__ static void With(Kind kind, const Run& run) {
    if constexpr (kFused) {
      (void)((kind == kKinds && (run(KindConstant<kKinds>()), true)) || ...);
    } else {
      (run(KindConstant<kKinds>()), ...);
    }
  }
};
using Plain = Kinds<kPlain>;
using FusedForward = Kinds<kLeakyOfX, kEluOfX>;
using FusedBackward = Kinds<kLeakyOfX, kLeakyOfY, kEluOfX>;

// The activation in the kernels' arithmetic; `inverse` is 1 / slope.
template <typename A>
struct Slopes {
  Kind kind;
  A slope, inverse;
};

template <typename A>
Slopes<A> MakeSlopes(const Activation& activation, bool from_output) {
  return {KindOf(activation, from_output), static_cast<A>(activation.slope),
          static_cast<A>(1 / activation.slope)};
}

// (x - mean) * scale + offset of one channel. The part of the mean that the arithmetic cannot hold
// is in the offset, so nothing is lost where the mean is far from zero.
template <typename A>
struct Affine {
  A mean, scale, offset;

  __device__ A Of(A x) const { return (x - mean) * scale + offset; }
};

template <typename A>
__device__ Affine<A> AffineOf(const double* mean, const double* scale, const double* offset,
                              int64_t channel) {
  const double exact = mean[channel], by = scale[channel];
  Affine<A> k;
  k.mean = static_cast<A>(exact);
  k.scale = static_cast<A>(by);
  k.offset = static_cast<A>(offset[channel] - by * (exact - static_cast<double>(k.mean)));
  return k;
}

// What Unwind needs of a channel; where it does not read x, the mean is all there is.
template <typename A>
__device__ Affine<A> RecoveryOf(Kind kind, const double* mean, const double* scale,
                                const double* offset, int64_t channel) {
  if (ReadsX(kind)) return AffineOf<A>(mean, scale, offset, channel);
  return {static_cast<A>(mean[channel]), 0, 0};
}

__device__ inline float Exp(float z) { return expf(z); }
__device__ inline double Exp(double z) { return exp(z); }
__device__ inline float Expm1(float z) { return expm1f(z); }
__device__ inline double Expm1(double z) { return expm1(z); }

// slope * v, and 0 where the slope is 0: of infinities, too.
template <typename A>
__device__ A OnSlope(const Slopes<A>& f, A v) {
  return f.slope != 0 ? f.slope * v : 0;
}

// f(z)
template <Kind kKind, typename A>
__device__ A Activate(A z, const Slopes<A>& f) {
  if (kKind == kLeakyOfX) return z <= 0 ? OnSlope(f, z) : z;  // a NaN stays one
  if (kKind == kEluOfX) return z > 0 ? z : f.slope * Expm1(z);
  return z;
}

// From t and dy = dL/dy to u, which is x - mean or z - offset, and dz = dL/dz.
template <Kind kKind, typename A>
__device__ void Unwind(A t, A dy, const Affine<A>& k, const Slopes<A>& f, A* u, A* dz) {
  *dz = dy;
  if (kKind == kLeakyOfY) {
    *dz = t > 0 ? dy : f.slope * dy;
    t = t > 0 ? t : f.inverse * t;
  }
  *u = t - k.mean;
  if (kKind == kLeakyOfX) *dz = k.Of(t) <= 0 ? OnSlope(f, dy) : dy;
  if (kKind == kEluOfX) {
    const A z = k.Of(t);
    *dz = z > 0 ? dy : f.slope * Exp(z) * dy;
  }
}

}  // namespace cuda
}  // namespace syncbn
