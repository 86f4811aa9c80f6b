// The first pass of backward: the sums of dz and of dz * xmu of each channel.
#include "kernels/cpu/reduce.inl"

namespace syncbn::cpu {
namespace {

template <Variant kVariant>
struct GradientTerms {
  static constexpr bool kBackward = true, kReadsX = ReadsX(kVariant);
  const double *center, *scale, *offset;
  Slopes<Doubles> f;

  template <typename T>
  SYNCBN_INLINE Affine<double> Channel(int64_t c, T /*first*/) const {
    return {center[c], kReadsX ? scale[c] : 0, kReadsX ? offset[c] : 0};
  }
  SYNCBN_INLINE void Of(Doubles saved, Doubles dy, const Affine<Doubles>& k, Doubles* first,
                        Doubles* second) const {
    Doubles centered;
    Unwind(kVariant, saved, dy, k, f, &centered, first);
    *second = *first * centered;
  }
};

template <typename T, Variant kVariant>
void SumsOfTile(const ReductionPass& pass, const Tile& tile, double* sum_dz,
                double* sum_dz_centered) {
  const GradientTerms<kVariant> terms = {CenterOf(pass), pass.scale, pass.offset,
                                         MakeSlopes<Doubles, double>(pass.activation.slope)};
  SumTile(terms, static_cast<const T*>(pass.in), static_cast<const T*>(pass.dy), tile, sum_dz,
          sum_dz_centered);
}

void RunSums(const ReductionPass& pass) {
  WithVariant<kPlain, kLeakyOfX, kLeakyOfY>(pass, [&](auto variant) {
    WithType(pass.dtype, [&](auto element) {
      Reduce(pass, SumsOfTile<decltype(element), variant.value>, AddSums);
    });
  });
  const bool empty = pass.layout.outer * pass.layout.inner == 0;
  for (int64_t c = 0; c < pass.layout.channels && !empty; ++c)
    pass.second[c] = PerScale(pass.second[c], pass, c);
}

}  // namespace
}  // namespace syncbn::cpu
