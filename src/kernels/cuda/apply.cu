// The second pass of backward: dx = scale * dz + scale_xmu * xmu + shift.
//
// This equals scale * dz + of_centered.scale * (unit * centered) + of_centered.offset;
// activation.inl defines `centered` and `unit`.
#include "kernels/cuda/map.cuh"

namespace syncbn::cuda {
namespace {

template <typename T>
struct ApplyFormula {
  using A = Arithmetic<T>;
  static constexpr char kName[] = "BackwardApply";
  static constexpr bool kBackward = true;
  A scale_dz, unit;
  Affine<A> of_centered, to_z;

  __device__ void Begin(const ElementwisePass& pass, const FusedActivation<A>& activation,
                        int64_t c) {
    const double scale = PerScale(pass.scale_xmu[c], pass, c);
    of_centered = MakeAffine<A>(CenterOf(pass)[c], scale, pass.shift[c]);
    double power;
    of_centered.scale = static_cast<A>(SplitCoefficient(scale, &power));
    unit = static_cast<A>(power);
    scale_dz = static_cast<A>(pass.scale[c]);
    to_z = activation.ToUnwind(pass, c);
  }
  __device__ A Of(const FusedActivation<A>& activation, A saved, A dy) const {
    A centered, dz;
    Unwind(activation.variant, saved, dy, to_z, activation.slopes, &centered, &dz);
    return scale_dz * dz + (of_centered.scale * (unit * centered) + of_centered.offset);
  }
};

}  // namespace

void BackwardApply(const ElementwisePass& pass, Stream stream) {
  switch (pass.dtype) {
    case DType::kFloat32: return Map<float, ApplyFormula<float>>(pass, stream);
    case DType::kFloat64: return Map<double, ApplyFormula<double>>(pass, stream);
    case DType::kFloat16: return Map<__half, ApplyFormula<__half>>(pass, stream);
  }
}

}  // namespace syncbn::cuda
