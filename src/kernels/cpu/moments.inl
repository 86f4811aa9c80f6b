// The first pass of forward: mean and m2 = sum((x - mean)^2) of each channel.
//
//   u = x - first,  mean = first + sum(u) / n,  m2 = sum(u * u) - sum(u)^2 / n
//
// `first` is the channel's first value in the tile, which has n elements. It is within
// sqrt(m2 * n / (n - 1)) of the mean, so m2 loses at most a factor of about n, whatever the mean
// is.
#include "kernels/cpu/reduce.inl"

namespace syncbn::cpu {
namespace {

struct MomentTerms {
  static constexpr bool kBackward = false, kReadsX = false;

  template <typename T>
  SYNCBN_INLINE Affine<double> Channel(int64_t /*c*/, T first) const {
    return {ToDouble(first), 0, 0};
  }
  SYNCBN_INLINE void Of(Doubles x, Doubles /*dy*/, const Affine<Doubles>& k, Doubles* first,
                        Doubles* second) const {
    *first = x - k.center;
    *second = *first * *first;
  }
};

template <typename T>
void MomentsOfTile(const ReductionPass& pass, const Tile& tile, double* mean, double* m2) {
  const T* x = static_cast<const T*>(pass.in);
  SumTile(MomentTerms(), x, x, tile, mean, m2);
  const T* firsts = FirstOf(x, tile);
  const double n =
      double((tile.outer_end - tile.outer_begin) * (tile.inner_end - tile.inner_begin));
  for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
    const double sum = mean[c];
    const double rest = m2[c] - sum * (sum / n);
    mean[c] = ToDouble(firsts[c * tile.inner]) + sum / n;
    m2[c] = rest < 0 ? 0 : rest;  // NaN stays NaN
  }
}

void RunMoments(const ReductionPass& pass) {
  WithType(pass.dtype,
           [&](auto element) { Reduce(pass, MomentsOfTile<decltype(element)>, MergeMoments); });
}

}  // namespace
}  // namespace syncbn::cpu
