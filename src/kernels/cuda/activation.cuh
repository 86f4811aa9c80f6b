// The activation on the device. Nothing here knows memory layouts.
#pragma once
#include <cstdint>

#include "kernels/cuda/numeric.h"
#include "kernels/passes.h"

namespace syncbn::cuda {

#define SYNCBN_FORMULA __device__ inline
#include "kernels/activation.inl"
#undef SYNCBN_FORMULA

// Per-channel arrays of a backward pass, see CenterOf and ScaleOfCentered.
struct Unwinding {
  const double *center, *scale_of_centered, *scale, *offset;
};

inline Unwinding UnwindingOf(const PassInput& input) {
  return {CenterOf(input), ScaleOfCentered(input), input.scale, input.offset};
}

// The numbers of a channel that Unwind reads.
template <Variant kVariant, typename A>
__device__ Affine<A> AffineToUnwind(const Unwinding& by, int64_t channel) {
  if (!ReadsX(kVariant)) return {static_cast<A>(by.center[channel]), 0, 0};
  return MakeAffine<A>(by.center[channel], by.scale[channel], by.offset[channel]);
}

// A channel's sum of dz * centered, or its coefficient of xmu, divided by the scale of centered.
__device__ inline double PerScale(double value, const Unwinding& by, int64_t channel) {
  return by.scale_of_centered == nullptr ? value : value / by.scale_of_centered[channel];
}

}  // namespace syncbn::cuda
