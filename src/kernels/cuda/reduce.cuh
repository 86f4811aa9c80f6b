// The kernels that sum over all elements of a channel, for both ways to cut a tensor. What is
// summed is the template parameter, see sums.cuh.
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
__device__ inline Pair GroupSum(const Pair& value, int group) {
  return {GroupSum(value.first, group), GroupSum(value.second, group)};
}

// Sum over the block, for thread 0.
template <int kThreads>
__device__ Pair BlockSum(Pair value) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ Pair warps[kWarps];
  value = GroupSum(value, kWarp);
  __syncthreads();  // the previous call may still be reading `warps`
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x >= kWarp) return value;
  return GroupSum(threadIdx.x < kWarps ? warps[threadIdx.x] : Pair{0, 0}, kWarp);
}

// Sum of at(i) over i = begin, begin + step, ... below `end`, in this order. Several are asked for
// before the first is added: memory is slow, and additions wait for one another.
template <typename At>
__device__ auto SumOf(int begin, int end, int step, const At& at) {
  constexpr int kAhead = 8;
  decltype(at(0)) sum = {};
  for (int i = begin; i < end; i += kAhead * step) {
    decltype(at(0)) terms[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int next = i + u * step;
      terms[u] = at(next < end ? next : end - 1);  // a branch would wait for each load
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (i + u * step < end) sum = sum + terms[u];
    }
  }
  return sum;
}

// True for the last of `blocks` to arrive here; everything that the others wrote before is visible
// to it then.
__device__ inline bool IsLast(unsigned* counter, int blocks) {
  __threadfence();
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == static_cast<unsigned>(blocks - 1);
    if (last) *counter = 0;
  }
  last = __syncthreads_or(last);
  if (last) __threadfence();
  return last;
}

// Past the first-level cache, which does not follow what other multiprocessors write.
__device__ inline Pair ReadPartial(const Pair* partial) {
  const double2 pair = __ldcg(reinterpret_cast<const double2*>(partial));
  return {pair.x, pair.y};
}

// `kAligned` as in Planes::SlotOf.
template <typename T, typename Sums, bool kAligned>
__global__ void __launch_bounds__(kPlanesThreads, kResidentPlanes)
    ReducePlanes(Planes cut, typename Sums::Arguments arguments, Workspace workspace) {
  constexpr int kUnroll = Sums::kUnroll, kWidth = Sums::kWidth;
  const Planes::Block block = cut.At(blockIdx.x);
  const int64_t origin = block.channel * cut.layout.inner;
  const int thread = static_cast<int>(threadIdx.x);
  Sums sums;
  int64_t count = 0;
  if (thread < block.items) {
    const Slot slot = cut.SlotOf<kAligned>(block, thread);
    const int64_t at = slot.begin < slot.end ? slot.offset + slot.begin : origin;
    sums.Shift(arguments, 0, block.channel, arguments.tensors[0][at]);
  }
  int round = 0;
  for (int item = thread; item < block.items; item += kUnroll * kPlanesThreads) {
    Vector<T, kWidth> tensors[kUnroll][Sums::kTensors];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Slot slot = cut.SlotOf<kAligned>(block, item + u * kPlanesThreads);
      count += slot.end > slot.begin ? slot.end - slot.begin : 0;
#pragma unroll
      for (int k = 0; k < Sums::kTensors; ++k) {
        tensors[u][k] = ReadSlot<kAligned, kWidth>(arguments.tensors[k], slot, sums.Filler(k, 0));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sums.Add(tensors[u]);
    if (++round % kFoldEvery == 0) sums.Fold();
  }
  sums.Fold();

  Pair total = BlockSum<kPlanesThreads>(sums.Sums(arguments, 0, count, origin));
  if (const int splits = cut.splits; splits > 1) {
    Pair* partials = workspace.partials + block.channel * splits;
    if (thread == 0) partials[block.split] = total;
    if (!IsLast(workspace.counters + block.channel, splits)) return;
    total = BlockSum<kPlanesThreads>(SumOf(
        thread, splits, kPlanesThreads, [&](int split) { return ReadPartial(partials + split); }));
  }
  if (thread == 0) Sums::Finish(arguments, block.channel, cut.layout.PerChannel(), origin, total);
}

// Calls use(channel of the tile, sum over i < entries of at(channel, i)) once for each of
// `channels` channels. As many neighbouring threads as there are for each channel share its
// entries; which thread calls `use` depends on sizes alone.
template <typename At, typename Use>
__device__ void SumByChannel(int channels, int entries, const At& at, const Use& use) {
  int log = 0;
  while (1 << log < kWarp && channels << (log + 1) <= kColumnsThreads) ++log;
  const int channel = static_cast<int>(threadIdx.x) >> log, group = 1 << log;
  const int lane = static_cast<int>(threadIdx.x) & (group - 1);
  const bool used = channel < channels;
  const auto sum = GroupSum(
      SumOf(lane, used ? entries : 0, group, [&](int i) { return at(channel, i); }), group);
  if (used && lane == 0) use(channel, sum);
}

// The index in shared memory of a tile's i-th number. Neighbouring threads write numbers that are a
// vector apart, and read numbers that are a row apart; in either case they reach different banks.
__device__ inline uint32_t Swizzled(uint32_t i) {
  constexpr uint32_t kBanks = 16;  // of doubles
  return i ^ i / kBanks % kBanks;
}

template <typename T, typename Sums>
__global__ void __launch_bounds__(kColumnsThreads, ResidentColumns(Sums::kWidth, Sums::kFused))
    ReduceColumns(Columns cut, typename Sums::Arguments arguments, Workspace workspace) {
  constexpr int kWidth = Sums::kWidth;
  constexpr int kUnroll = UnrollColumns(kWidth, Sums::kFused, Sums::kUnroll);
  const Columns::Block block = cut.At(blockIdx.x);
  const Columns::Place place = cut.PlaceOf(block, static_cast<int>(threadIdx.x));
  Sums sums;
  if (place.count > 0) {
    int64_t offset = place.offset;
    const Vector<T, kWidth> first =
        *reinterpret_cast<const Vector<T, kWidth>*>(arguments.tensors[0] + offset);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sums.Shift(arguments, j, cut.ChannelOf(block, place.column + j), first.values[j]);
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
            tensors[u][k] = *reinterpret_cast<const Vector<T, kWidth>*>(arguments.tensors[k] + at);
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

  // The tile's sums as [row][column], both quantities at once. Without padding there is room on any
  // multiprocessor for as many tiles as its registers have blocks.
  constexpr int kNumbers = kColumnsThreads * kWidth;
  __shared__ double firsts[kNumbers], seconds[kNumbers];
  static_assert(ResidentColumns(kWidth, Sums::kFused) * 2 * sizeof(firsts) <= 64 << 10, "sm_75");
  const int inner = static_cast<int>(cut.layout.inner);
  const auto finish = [&](int channel, const Pair& sum) {
    const int64_t c = block.channel_begin + channel;
    Sums::Finish(arguments, c, cut.layout.PerChannel(), c * cut.layout.inner, sum);
  };
  const auto partial_at = [&](int channel, int64_t split) {
    return workspace.partials + split * cut.layout.channels + block.channel_begin + channel;
  };
  Pair mine[kWidth] = {};
  if (place.count > 0) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int64_t origin = cut.ChannelOf(block, place.column + j) * cut.layout.inner;
      mine[j] = sums.Sums(arguments, j, place.count, origin);
    }
  }
  if (place.row < cut.rows) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const uint32_t at = Swizzled(threadIdx.x * kWidth + j);
      firsts[at] = mine[j].first;
      seconds[at] = mine[j].second;
    }
  }
  __syncthreads();
  const int row_skip = cut.tile_slots * kWidth - inner;  // the other channels' numbers
  SumByChannel(
      block.channels, cut.rows * inner,
      [&](int channel, int i) -> Pair {
        const int row = static_cast<int>(cut.by_inner.Quotient(static_cast<uint32_t>(i)));
        const uint32_t at = Swizzled(static_cast<uint32_t>(channel * inner + row * row_skip + i));
        return {firsts[at], seconds[at]};
      },
      [&](int channel, const Pair& sum) {
        if (cut.outer_blocks == 1) {
          finish(channel, sum);
        } else {
          *partial_at(channel, block.split) = sum;
        }
      });
  if (cut.outer_blocks == 1) return;
  if (!IsLast(workspace.counters + block.tile, cut.outer_blocks)) return;
  SumByChannel(
      block.channels, cut.outer_blocks,
      [&](int channel, int split) { return ReadPartial(partial_at(channel, split)); }, finish);
}

}  // namespace syncbn::cuda
