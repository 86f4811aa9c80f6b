// The four passes, tile by tile on several threads; isa.h has the kernels of a tile.
#include "kernels/cpu/batch_norm_cpu.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "core/moments.h"
#include "core/parallel_for.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/partition.h"

namespace syncbn::cpu {
namespace {

// Tensors up to this many elements are done before another thread has woken up.
constexpr int64_t kAloneSize = 32768;

// Outputs of this size have left the caches before they are read, and storing past the caches saves
// fetching them first.
constexpr int64_t kStreamSize = 8 << 20;

template <typename OnTile>
void ForEachTile(const Partition& partition, const OnTile& on_tile) {
  const int64_t tiles = partition.Tiles();
  if (partition.layout.Size() > kAloneSize) return ParallelFor(tiles, std::cref(on_tile));
  for (int64_t index = 0; index < tiles; ++index) on_tile(index);
}

// Reduces a tensor to two numbers of each channel: `kernel` leaves those of a tile, and
// merge(elements of a channel, first, second) merges them in a fixed order.
template <typename Kernel, typename Merge>
void Reduce(const ReductionPass& pass, const Kernel& kernel, const Merge& merge) {
  const int64_t channels = pass.layout.channels;
  const Partition partition = Cut(pass.layout);
  std::vector<double> partials(static_cast<size_t>(2 * partition.Partials() * channels));
  const auto of_partial = [&](int64_t partial) { return &partials[2 * partial * channels]; };
  ForEachTile(partition, [&](int64_t index) {
    double* const first = of_partial(partition.PartialOf(index));
    kernel(pass, partition.At(index), first, first + channels);
  });
  for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
    const double* const first = of_partial(partial);
    merge(static_cast<double>(partition.Count(partial)), first, first + channels);
  }
}

StoreMode ModeOf(const ElementwisePass& pass) {
  if (pass.mode == WriteMode::kAdd) return StoreMode::kAdd;
  const int64_t size = static_cast<int64_t>(SizeOf(pass.dtype));
  // Arrays that wrap foreign memory may be unaligned.
  const bool aligned = reinterpret_cast<uintptr_t>(pass.out) % SizeOf(pass.dtype) == 0;
  const bool large = pass.layout.Size() * size >= kStreamSize;
  return aligned && large ? StoreMode::kStream : StoreMode::kAssign;
}

// Writes a tensor, tile by tile.
template <typename Kernel>
void Write(const ElementwisePass& pass, const Kernel& kernel) {
  if (pass.layout.Size() == 0) return;
  const Partition partition = Cut(pass.layout);
  const StoreMode mode = ModeOf(pass);
  ForEachTile(partition, [&](int64_t index) { kernel(pass, partition.At(index), mode); });
}

}  // namespace

void LocalMoments(const ReductionPass& pass) {
  const int64_t channels = pass.layout.channels;
  std::fill_n(pass.first, channels, 0.0);
  std::fill_n(pass.second, channels, 0.0);
  if (pass.layout.Size() == 0) return;
  double done = 0;
  // All channels have the same counts, so the compiler divides once for each partial result.
  const auto merge = [&](double count, const double* mean, const double* m2) {
    for (int64_t c = 0; c < channels; ++c) {
      const Moments merged = Merge({done, pass.first[c], pass.second[c]}, {count, mean[c], m2[c]});
      pass.first[c] = merged.mean;
      pass.second[c] = merged.m2;
    }
    done += count;
  };
  Reduce(pass, ChooseIsa().local_moments, merge);
}

void BackwardSums(const ReductionPass& pass) {
  const int64_t channels = pass.layout.channels;
  std::fill_n(pass.first, channels, 0.0);
  std::fill_n(pass.second, channels, 0.0);
  if (pass.layout.Size() == 0) return;
  const auto add = [&](double /*count*/, const double* sum_dz, const double* sum_dz_centered) {
    for (int64_t c = 0; c < channels; ++c) {
      pass.first[c] += sum_dz[c];
      pass.second[c] += sum_dz_centered[c];
    }
  };
  Reduce(pass, ChooseIsa().backward_sums, add);
  if (!pass.from_output) return;
  // From y the tiles' centered is xmu * scale.
  for (int64_t c = 0; c < channels; ++c) pass.second[c] /= pass.scale[c];
}

void Normalize(const ElementwisePass& pass) { Write(pass, ChooseIsa().normalize); }

void BackwardApply(const ElementwisePass& pass) { Write(pass, ChooseIsa().backward_apply); }

const char* InstructionSet() { return ChooseIsa().name; }

}  // namespace syncbn::cpu
