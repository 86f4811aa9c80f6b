// The first pass of forward: mean and m2 = sum((x - mean)^2) of each channel.
//
//   u = x - first,  mean = first + sum(u) / n,  m2 = sum(u * u) - sum(u)^2 / n
//
// `first` is the first value that a thread reads, so u is small whatever the mean is. Moments of
// threads and blocks are merged in double (core/moments.h). A mean stays the difference from an x,
// so it is as exact as the deviation.
#include "core/moments.h"

#include "kernels/cuda/reduce.cuh"

namespace syncbn::cuda {
namespace {

template <typename T>
struct MomentTerms {
  using A = Arithmetic<T>;
  static constexpr char kName[] = "LocalMoments";
  static constexpr bool kBackward = false;
  A shift;

  __device__ void Begin(const ReductionPass& /*pass*/, const FusedActivation<A>& /*activation*/,
                        int64_t /*c*/, T first) {
    shift = Load(first);
  }
  __device__ void Add(const FusedActivation<A>& /*activation*/, A x, A /*dy*/, A* first,
                      A* second) const {
    const A u = x - shift;
    *first += u;
    *second += u * u;
  }
  __device__ Partial Of(const Partial& sums) const {
    const double mean = sums.first / sums.count, m2 = sums.second - mean * sums.first;
    return {sums.count, mean, m2 < 0 ? 0 : m2, shift};  // below 0 by rounding; NaN stays NaN
  }
  __device__ static Partial Merge(const Partial& a, const Partial& b) {
    if (a.count == 0) return b;
    if (b.count == 0) return a;
    const double mean_from_a = b.first + (b.origin - a.origin);
    const Moments all =
        syncbn::Merge({a.count, a.first, a.second}, {b.count, mean_from_a, b.second});
    return {all.count, all.mean, all.m2, a.origin};
  }
  __device__ static void Finish(const ReductionPass& pass, int64_t c, const Partial& all) {
    pass.first[c] = all.origin + all.first;
    pass.second[c] = all.second;
  }
};

}  // namespace

int64_t WorkspaceBytes() {
  return kWorkspaceZeros + MaxPartials(Multiprocessors()) * sizeof(Partial);
}

void LocalMoments(const ReductionPass& pass, void* workspace, Stream stream) {
  switch (pass.dtype) {
    case DType::kFloat32: return Reduce<float, MomentTerms<float>>(pass, workspace, stream);
    case DType::kFloat64: return Reduce<double, MomentTerms<double>>(pass, workspace, stream);
    case DType::kFloat16: return Reduce<__half, MomentTerms<__half>>(pass, workspace, stream);
  }
}

}  // namespace syncbn::cuda
