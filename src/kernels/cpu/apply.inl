// The second pass of backward: dx = scale * dz + scale_xmu * xmu + shift.
//
// This equals scale_in * (unit * centered) + shift + scale * dz; activation.inl defines `centered`
// and `unit`.
#include "kernels/cpu/map.inl"

namespace syncbn::cpu {
namespace {

template <Variant kVariant>
struct ApplyFormula {
  static constexpr bool kBackward = true, kReadsX = ReadsX(kVariant);

  template <typename Scalar>
  static SYNCBN_INLINE Coefficients<Scalar> Channel(const ElementwisePass& pass, int64_t c) {
    Coefficients<Scalar> k = {};
    const double center = CenterOf(pass)[c], scale = PerScale(pass.scale_xmu[c], pass, c);
    Affine<Scalar> of_in = MakeAffine<Scalar>(center, scale, pass.shift[c]);
    double unit;
    of_in.scale = Scalar(SplitCoefficient(scale, &unit));
    k.unit = Scalar(unit);
    if (kReadsX) k.to_z = MakeAffine<Scalar>(center, pass.scale[c], pass.offset[c]);
    k.scale_dz = Scalar(pass.scale[c]);
    k.Set(of_in);
    return k;
  }
  template <typename Vector>
  static SYNCBN_INLINE Vector Of(Vector saved, Vector dy, const Coefficients<Vector>& k,
                                 const Slopes<Vector>& f) {
    Vector centered, dz;
    Unwind(kVariant, saved, dy, k.to_z, f, &centered, &dz);
    return k.scale_in * (k.unit * centered) + k.shift + k.scale_dz * dz;
  }
};

void RunApply(const ElementwisePass& pass) {
  WithVariant<kPlain, kLeakyOfX, kLeakyOfY>(pass, [&](auto variant) {
    WithType(pass.dtype, [&](auto element) {
      Map(pass, MapOf<ApplyFormula<variant.value>, decltype(element)>(pass));
    });
  });
}

}  // namespace
}  // namespace syncbn::cpu
