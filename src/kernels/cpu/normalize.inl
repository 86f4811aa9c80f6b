// The second pass of forward: y = f(z), z = (x - mean) * scale + offset.
#include "kernels/cpu/map.inl"

namespace syncbn::cpu {
namespace {

template <Variant kVariant>
struct NormalizeFormula {
  static constexpr bool kBackward = false, kReadsX = false;

  template <typename Scalar>
  static SYNCBN_INLINE Coefficients<Scalar> Channel(const ElementwisePass& pass, int64_t c) {
    Coefficients<Scalar> k = {};
    k.Set(MakeAffine<Scalar>(pass.mean[c], pass.scale[c], pass.offset[c]));
    return k;
  }
  template <typename Vector>
  static SYNCBN_INLINE Vector Of(Vector x, Vector /*dy*/, const Coefficients<Vector>& k,
                                 const Slopes<Vector>& f) {
    return Activate(kVariant, k.scale_in * (x - k.to_z.center) + k.shift, f);
  }
};

void RunNormalize(const ElementwisePass& pass) {
  WithVariant<kPlain, kLeakyOfX>(pass, [&](auto variant) {
    WithType(pass.dtype, [&](auto element) {
      Map(pass, MapOf<NormalizeFormula<variant.value>, decltype(element)>(pass));
    });
  });
}

}  // namespace
}  // namespace syncbn::cpu
