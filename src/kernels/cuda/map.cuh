// Writes a tensor element by element, by the formulas of normalize.cu and apply.cu. The output may
// be one of the inputs.
//
// A `Formula` has Begin(pass, activation, c), which sets channel c; Of(activation, x, dy), which
// returns the result; and kBackward and kName, as in reduce.cuh.
#pragma once
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/tensor.cuh"

namespace syncbn::cuda {

// kChannels as in reduce.cuh.
template <typename T, int kWidth, int kChannels, typename Formula>
__global__ void __launch_bounds__(kThreads) MapKernel(Cut cut, ElementwisePass pass) {
  using A = Arithmetic<T>;
  constexpr int kUnroll = Formula::kBackward ? 2 : 4;
  const Work work = cut.At(blockIdx.x, static_cast<int>(threadIdx.x));
  if (work.begin >= work.end) return;
  const bool add = pass.mode == WriteMode::kAdd;
  const FusedActivation<A> activation(pass);
  Formula formulas[kChannels];
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    formulas[k].Begin(pass, activation, cut.ChannelOf(work, k));
  }
  for (int64_t i = work.begin; i < work.end; i += kUnroll * cut.rows) {
    Vector<T, kWidth> in[kUnroll], dy[kUnroll] = {};
    ReadVectors<Formula::kBackward>(pass, cut, work, i, in, dy);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * cut.rows >= work.end) continue;
      const int64_t at = cut.OffsetOf(work, i + u * cut.rows);
      Vector<T, kWidth> out = {};
      if (add) out = Read<T, kWidth>(pass.out, at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const A value =
            formulas[j % kChannels].Of(activation, Load(in[u].values[j]), Load(dy[u].values[j]));
        out.values[j] = Store<T>(add ? Load(out.values[j]) + value : value);
      }
      Write(pass.out, at, out);
    }
  }
}

template <typename T, typename Formula>
void Map(const ElementwisePass& pass, Stream stream) {
  if (pass.layout.Size() == 0) return;
  const bool aligned = AreAligned({pass.in, pass.dy, pass.out});
  const Cut cut = MakeCut(pass.layout, sizeof(T), aligned, Multiprocessors());
  const int64_t blocks = cut.tiles * cut.splits;
  if (cut.width == 1) {
    Launch<MapKernel<T, 1, 1, Formula>>(Formula::kName, blocks, kThreads, stream, cut, pass);
  } else if (cut.columns) {
    Launch<MapKernel<T, kWide<T>, kWide<T>, Formula>>(Formula::kName, blocks, kThreads, stream, cut,
                                                      pass);
  } else {
    Launch<MapKernel<T, kWide<T>, 1, Formula>>(Formula::kName, blocks, kThreads, stream, cut, pass);
  }
}

}  // namespace syncbn::cuda
