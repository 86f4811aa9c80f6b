// The second pass of forward: y = f(z), z = (x - mean) * scale + offset.
#include "kernels/cuda/map.cuh"

namespace syncbn::cuda {
namespace {

template <typename T>
struct NormalizeFormula {
  using A = Arithmetic<T>;
  static constexpr char kName[] = "Normalize";
  static constexpr bool kBackward = false;
  Affine<A> to_z;

  __device__ void Begin(const ElementwisePass& pass, const FusedActivation<A>& /*activation*/,
                        int64_t c) {
    to_z = MakeAffine<A>(pass.mean[c], pass.scale[c], pass.offset[c]);
  }
  __device__ A Of(const FusedActivation<A>& activation, A x, A /*dy*/) const {
    return Activate(activation.variant, to_z.Of(x), activation.slopes);
  }
};

}  // namespace

void Normalize(const ElementwisePass& pass, Stream stream) {
  switch (pass.dtype) {
    case DType::kFloat32: return Map<float, NormalizeFormula<float>>(pass, stream);
    case DType::kFloat64: return Map<double, NormalizeFormula<double>>(pass, stream);
    case DType::kFloat16: return Map<__half, NormalizeFormula<__half>>(pass, stream);
  }
}

}  // namespace syncbn::cuda
