// The kernels that sum over all elements of a channel, for both ways to cut a tensor.
// Who uses it: batch_norm.cuh. What is summed is the template parameter, see sums.cuh.
//
// If several blocks share a channel, each leaves a partial result in the workspace, and the last
// one to finish adds them up in their order: one launch, and the same bits in every run.
#pragma once
#include "kernels/cuda/access.h"
#include "kernels/cuda/sums.cuh"

namespace syncbn::cuda {

constexpr int kWarp = 32;

struct Workspace {
  unsigned* counters;  // kCounters zeros, which each kernel leaves as zeros
  Pair* partials;
};

// Sum over `group` neighbouring lanes, a power of two; every lane of the warp calls it.
__device__ inline double GroupSum(double value, int group) {
  for (int offset = group / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Sum over the block, for thread 0.
template <int kThreads>
__device__ Pair BlockSum(Pair value) {
  __shared__ Pair warps[kThreads / kWarp];
  value = {GroupSum(value.first, kWarp), GroupSum(value.second, kWarp)};
  __syncthreads();  // the previous call may still be reading `warps`
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    value = threadIdx.x < kWarps ? warps[threadIdx.x] : Pair{0, 0};
    value = {GroupSum(value.first, kWarp), GroupSum(value.second, kWarp)};
  }
  return value;
}

// True for the last of `blocks` to arrive here; everything that the others wrote before is visible
// to it then.
__device__ inline bool IsLast(unsigned* counter, int blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == static_cast<unsigned>(blocks - 1);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Past the first-level cache, which does not follow what other multiprocessors write.
__device__ inline Pair ReadPartial(const Pair* partial) {
  const double2 pair = __ldcg(reinterpret_cast<const double2*>(partial));
  return {pair.x, pair.y};
}

// `kWhole` as in Planes::SlotOf.
template <typename T, typename Sums, bool kWhole>
__global__ void __launch_bounds__(kPlanesThreads, ResidentPlanes(Sums::kFused))
    ReducePlanes(Planes cut, typename Sums::Arguments arguments, Workspace workspace) {
  constexpr int kUnroll = Sums::kUnroll, kWidth = Sums::kWidth;
  const Planes::Block block = cut.At(blockIdx.x);
  const int64_t origin = block.channel * cut.layout.inner;
  const int thread = static_cast<int>(threadIdx.x);
  Sums sums;
  int64_t count = 0;
  if (thread < block.items) {
    const Slot slot = cut.SlotOf<kWhole>(block, thread);
    const int64_t at = slot.begin < slot.end ? slot.offset + slot.begin : origin;
    sums.Shift(arguments, 0, block.channel, arguments.tensors[0][at]);
  }
  int round = 0;
  for (int item = thread; item < block.items; item += kUnroll * kPlanesThreads) {
    Vector<T, kWidth> tensors[kUnroll][Sums::kTensors];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Slot slot = cut.SlotOf<kWhole>(block, item + u * kPlanesThreads);
      count += slot.end > slot.begin ? slot.end - slot.begin : 0;
#pragma unroll
      for (int k = 0; k < Sums::kTensors; ++k) {
        tensors[u][k] = ReadSlot<kWhole, kWidth>(arguments.tensors[k], slot, sums.Filler(k, 0));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sums.Add(tensors[u]);
    if (++round % kFoldEvery == 0) sums.Fold();
  }
  sums.Fold();

  Pair total = BlockSum<kPlanesThreads>(sums.Sums(arguments, 0, count, origin));
  const int splits = cut.Splits();
  if (splits > 1) {
    Pair* partials = workspace.partials + block.channel * splits;
    if (thread == 0) partials[block.split] = total;
    if (!IsLast(workspace.counters + block.channel, splits)) return;
    total = {0, 0};
    for (int split = thread; split < splits; split += kPlanesThreads) {
      const Pair partial = ReadPartial(partials + split);
      total = {total.first + partial.first, total.second + partial.second};
    }
    total = BlockSum<kPlanesThreads>(total);
  }
  if (thread == 0) Sums::Finish(arguments, block.channel, cut.layout.PerChannel(), origin, total);
}

// Calls use(channel of the tile, sum over i < entries of at(channel, i)) once for each of
// `channels` channels. As many neighbouring threads as there are for each channel share its
// entries; which thread calls `use` depends on sizes alone.
template <typename At, typename Use>
__device__ void SumByChannel(int channels, int64_t entries, const At& at, const Use& use) {
  int group = 1;
  while (group < kWarp && 2 * group * channels <= kColumnsThreads) group *= 2;
  const int groups = kColumnsThreads / group;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int first = static_cast<int>(threadIdx.x) / group;
  for (int base = 0; base < channels; base += groups) {
    const int channel = base + first;
    Pair sum = {0, 0};
    if (channel < channels) {
#pragma unroll 4
      for (int64_t i = lane; i < entries; i += group) {
        const Pair entry = at(channel, i);
        sum = {sum.first + entry.first, sum.second + entry.second};
      }
    }
    sum = {GroupSum(sum.first, group), GroupSum(sum.second, group)};
    if (channel < channels && lane == 0) use(channel, sum);
  }
}

template <typename T, typename Sums>
__global__ void __launch_bounds__(kColumnsThreads, ResidentColumns(Sums::kWidth, Sums::kFused))
    ReduceColumns(Columns cut, typename Sums::Arguments arguments, Workspace workspace) {
  constexpr int kWidth = Sums::kWidth;
  constexpr int kUnroll = UnrollColumns(kWidth, Sums::kFused, Sums::kUnroll);
  const Columns::Block block = cut.At(blockIdx.x);
  const int inner = static_cast<int>(cut.layout.inner);
  const Columns::Place place = cut.PlaceOf(block, static_cast<int>(threadIdx.x));
  Sums sums;
  if (place.count > 0) {
    int64_t offset = place.offset;
    const Vector<T, kWidth> first =
        *reinterpret_cast<const Vector<T, kWidth>*>(arguments.tensors[0] + offset);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sums.Shift(arguments, j, block.channel_begin + (place.column + j) / inner, first.values[j]);
    }
    int round = 0;
    for (int i = 0; i < place.count; i += kUnroll, offset += kUnroll * cut.row_step) {
      Vector<T, kWidth> tensors[kUnroll][Sums::kTensors];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool inside = i + u < place.count;
        const int64_t at = offset + u * cut.row_step;
#pragma unroll
        for (int k = 0; k < Sums::kTensors; ++k) {
          if (inside) {
            tensors[u][k] =
                *reinterpret_cast<const Vector<T, kWidth>*>(arguments.tensors[k] + at);
          } else {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) tensors[u][k].values[j] = sums.Filler(k, j);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) sums.Add(tensors[u]);
      if (++round % kFoldEvery == 0) sums.Fold();
    }
    sums.Fold();
  }

  // The tile's sums, first quantity and then second, as [row][slot][column of the slot] in shared
  // memory, where a slot is one longer than its vector: so neighbouring threads write to different
  // banks.
  constexpr int kPadded = kWidth > 1 ? kWidth + 1 : 1;
  __shared__ double tile[kColumnsThreads * kPadded];
  __shared__ double firsts[kMostTileSlots * kWidth];
  const auto at = [&](int row, int column) -> double& {
    return tile[(row * cut.tile_slots + column / kWidth) * kPadded + column % kWidth];
  };
  const auto finish = [&](int channel, const Pair& sum) {
    const int64_t c = block.channel_begin + channel;
    Sums::Finish(arguments, c, cut.layout.PerChannel(), c * inner, sum);
  };
  const auto partial_at = [&](int channel, int64_t split) {
    return workspace.partials + split * cut.layout.channels + block.channel_begin + channel;
  };
  Pair mine[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int64_t channel = block.channel_begin + (place.column + j) / inner;
    mine[j] = place.count > 0 ? sums.Sums(arguments, j, place.count, channel * inner) : Pair{0, 0};
  }
#pragma unroll
  for (int quantity = 0; quantity < 2; ++quantity) {
    __syncthreads();
    if (place.row < cut.rows) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        at(place.row, place.column + j) = quantity ? mine[j].second : mine[j].first;
      }
    }
    __syncthreads();
    SumByChannel(
        block.channels, cut.rows * inner,
        [&](int channel, int64_t i) {
          const int row = static_cast<int>(i) / inner, column = static_cast<int>(i) % inner;
          return Pair{at(row, channel * inner + column), 0};
        },
        [&](int channel, const Pair& sum) {
          if (quantity == 0) {
            firsts[channel] = sum.first;
          } else if (cut.outer_blocks == 1) {
            finish(channel, {firsts[channel], sum.first});
          } else {
            *partial_at(channel, block.split) = {firsts[channel], sum.first};
          }
        });
  }
  if (cut.outer_blocks == 1) return;
  if (!IsLast(workspace.counters + block.tile, cut.outer_blocks)) return;
  SumByChannel(
      block.channels, cut.outer_blocks,
      [&](int channel, int64_t split) { return ReadPartial(partial_at(channel, split)); }, finish);
}

}  // namespace syncbn::cuda
