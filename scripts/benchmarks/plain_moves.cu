// Kernels that move as many bytes as a pass, and compute next to nothing: its limit on a GPU.
// Who uses it: benchmark_gpu.cc.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numeric.h"

namespace syncbn::cuda {
namespace {

using Four = Vector<float, 4>;
constexpr int kThreads = 256, kAhead = 4;

template <int kReads, bool kWrites>
__global__ void Move(const Four* first, const Four* second, Four* to, int64_t vectors) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kAhead * kThreads + threadIdx.x;
  Four sums[kAhead] = {}, others[kAhead] = {};
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t i = begin + u * kThreads;
    if (i >= vectors) continue;
    sums[u] = first[i];
    if (kReads > 1) others[u] = second[i];
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t i = begin + u * kThreads;
    float all = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) all += sums[u].values[j] += others[u].values[j];
    // Without a use the compiler would leave the reads out.
    if (i < vectors && (kWrites || all == 12345.678f)) to[i] = sums[u];
  }
}

}  // namespace

void MovePlainly(int reads, bool writes, const void* first, const void* second, void* to,
                 int64_t bytes, cudaStream_t stream) {
  const int64_t vectors = bytes / static_cast<int64_t>(sizeof(Four));
  const auto move =
      reads > 1 ? (writes ? Launch<Move<2, true>, const Four*, const Four*, Four*, int64_t>
                          : Launch<Move<2, false>, const Four*, const Four*, Four*, int64_t>)
                : (writes ? Launch<Move<1, true>, const Four*, const Four*, Four*, int64_t>
                          : Launch<Move<1, false>, const Four*, const Four*, Four*, int64_t>);
  move("MovePlainly", vectors / (kAhead * kThreads) + 1, kThreads, stream,
       static_cast<const Four*>(first), static_cast<const Four*>(second), static_cast<Four*>(to),
       vectors);
}

}  // namespace syncbn::cuda
