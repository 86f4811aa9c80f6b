// The first pass of backward: the sums of dz and of dz * xmu of each channel.
//
// Terms use the center as rounded to the data's arithmetic; Finish corrects the rounding error.
#include "kernels/cuda/reduce.cuh"

namespace syncbn::cuda {
namespace {

template <typename T>
struct GradientTerms {
  using A = Arithmetic<T>;
  static constexpr char kName[] = "BackwardSums";
  static constexpr bool kBackward = true;
  Affine<A> to_z;

  __device__ void Begin(const ReductionPass& pass, const FusedActivation<A>& activation, int64_t c,
                        T /*first*/) {
    to_z = activation.ToUnwind(pass, c);
  }
  __device__ void Add(const FusedActivation<A>& activation, A saved, A dy, A* first,
                      A* second) const {
    A centered, dz;
    Unwind(activation.variant, saved, dy, to_z, activation.slopes, &centered, &dz);
    *first += dz;
    *second += dz * centered;
  }
  __device__ Partial Of(const Partial& sums) const { return sums; }
  __device__ static Partial Merge(const Partial& a, const Partial& b) {
    return {0, a.first + b.first, a.second + b.second, 0};
  }
  __device__ static void Finish(const ReductionPass& pass, int64_t c, const Partial& all) {
    const double center = CenterOf(pass)[c];
    const double lost = center - static_cast<double>(static_cast<A>(center));
    pass.first[c] = all.first;
    pass.second[c] = PerScale(all.second - lost * all.first, pass, c);
  }
};

}  // namespace

void BackwardSums(const ReductionPass& pass, void* workspace, Stream stream) {
  switch (pass.dtype) {
    case DType::kFloat32: return Reduce<float, GradientTerms<float>>(pass, workspace, stream);
    case DType::kFloat64: return Reduce<double, GradientTerms<double>>(pass, workspace, stream);
    case DType::kFloat16: return Reduce<__half, GradientTerms<__half>>(pass, workspace, stream);
  }
}

}  // namespace syncbn::cuda
