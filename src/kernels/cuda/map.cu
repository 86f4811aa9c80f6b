// The passes that write a tensor, element by element. The output may be one of the inputs.
//
// A `Formula` has Begin(pass, activation, c), which computes constants of channel c, and
// Of(activation, x, dy), which returns an element of the output. kBackward is true if Of reads dy.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/tensor.cuh"

namespace syncbn::cuda {
namespace {

// kChannels is 1 if all elements of a vector are in one channel, and otherwise kWidth.
template <typename T, int kWidth, int kChannels, typename Formula>
__global__ void __launch_bounds__(kThreads) MapKernel(Cut cut, ElementwisePass pass) {
  using A = Arithmetic<T>;
  constexpr int kUnroll = Formula::kBackward ? 2 : 4;
  const Work work = cut.At(blockIdx.x, static_cast<int>(threadIdx.x));
  if (work.begin >= work.end) return;
  const bool add = pass.mode == WriteMode::kAdd;
  const FusedActivation<A> activation(pass);
  Formula formulas[kChannels];
  int64_t channels[kChannels];
  cut.ChannelsOf(work, channels);
#pragma unroll
  for (int k = 0; k < kChannels; ++k) formulas[k].Begin(pass, activation, channels[k]);
  for (Walk walk = cut.Begin(work); walk.i < walk.end;) {
    Place places[kUnroll];
    Vector<T, kWidth> in[kUnroll], dy[kUnroll] = {};
    ReadVectors<Formula::kBackward>(pass, cut, &walk, places, in, dy);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (places[u].elements == 0) continue;
      Vector<T, kWidth> out = {};
      if (add) out = Read<T, kWidth>(pass.out, places[u]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const A value =
            formulas[j % kChannels].Of(activation, Load(in[u].values[j]), Load(dy[u].values[j]));
        out.values[j] = Store<T>(add ? Load(out.values[j]) + value : value);
      }
      Write(pass.out, places[u], out);
    }
  }
}

template <template <typename> typename Formula>
void Map(const ElementwisePass& pass, cudaStream_t stream) {
  if (pass.layout.Size() == 0) return;
  const auto launch = [&](auto element, auto width, auto channels, const Cut& cut) {
    using T = decltype(element);
    Launch<MapKernel<T, decltype(width)::value, decltype(channels)::value, Formula<T>>>(
        Formula<T>::kName, cut.tiles * cut.splits, kThreads, stream, cut, pass);
  };
  WithDType(pass, {pass.in, pass.dy, pass.out}, launch);
}

// ---- the second pass of forward: y = f(z), z = (x - mean) * scale + offset ----------------------

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

// ---- the second pass of backward: dx = scale * dz + scale_xmu * xmu + shift ---------------------
//
// activation.inl describes `centered`, which replaces xmu here, and SplitCoefficient.

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
    double power_of_two;
    of_centered.scale = static_cast<A>(SplitCoefficient(scale, &power_of_two));
    unit = static_cast<A>(power_of_two);
    scale_dz = static_cast<A>(pass.scale[c]);
    to_z = activation.MakeToZ(pass, c);
  }
  __device__ A Of(const FusedActivation<A>& activation, A saved, A dy) const {
    A centered, dz;
    Unwind(activation.variant, saved, dy, to_z, activation.slopes, &centered, &dz);
    return scale_dz * dz + (of_centered.scale * (unit * centered) + of_centered.offset);
  }
};

}  // namespace

void Normalize(const ElementwisePass& pass, cudaStream_t stream) {
  Map<NormalizeFormula>(pass, stream);
}

void BackwardApply(const ElementwisePass& pass, cudaStream_t stream) {
  Map<ApplyFormula>(pass, stream);
}

}  // namespace syncbn::cuda
