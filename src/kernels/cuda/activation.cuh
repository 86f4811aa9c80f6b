// The activation on the device, and the numbers of a channel that lead from x to z. Nothing here
// knows memory layouts.
#pragma once
#include <cstdint>

#include "kernels/cuda/numeric.h"
#include "kernels/passes.h"

namespace syncbn::cuda {

#define SYNCBN_FORMULA __device__ inline
#include "kernels/activation.inl"
#undef SYNCBN_FORMULA

// (x - mean) * scale + offset of one channel. The part of the mean that the arithmetic cannot hold
// is in the offset, so nothing is lost where the mean is far from zero.
template <typename A>
__device__ Affine<A> AffineOf(double mean, double scale, double offset) {
  Affine<A> k;
  k.mean = static_cast<A>(mean);
  k.scale = static_cast<A>(scale);
  k.offset = static_cast<A>(offset - scale * (mean - static_cast<double>(k.mean)));
  return k;
}

// Per-channel arrays of a backward pass, see OriginOf and UnitOf.
struct Unwinding {
  const double *origin, *unit, *scale, *offset;
};

inline Unwinding UnwindingOf(const BackwardInput& input) {
  return {OriginOf(input), UnitOf(input), input.scale, input.offset};
}

// The numbers of a channel that Unwind reads; where it does not read x, the origin is all there is.
template <Kind kKind, typename A>
__device__ Affine<A> AffineToUnwind(const Unwinding& by, int64_t channel) {
  if (!ReadsX(kKind)) return {static_cast<A>(by.origin[channel]), 0, 0};
  return AffineOf<A>(by.origin[channel], by.scale[channel], by.offset[channel]);
}

// A channel's sum of dz * u, or its coefficient b, divided by the unit.
__device__ inline double PerUnit(double value, const Unwinding& by, int64_t channel) {
  return by.unit == nullptr ? value : value / by.unit[channel];
}

}  // namespace syncbn::cuda
