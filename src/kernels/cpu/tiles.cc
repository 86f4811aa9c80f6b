// The passes on the CPU. Tiles depend on the shape of the tensor, not on the number of threads, and
// their results are merged in order, so results are the same in every run.
#include "kernels/cpu/tiles.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "core/moments.h"
#include "core/parallel_for.h"

namespace syncbn::cpu {
namespace {

// A tile has about this many elements, which take some 10 us: 128 KiB of float32 fit into the cache
// of a core. A large tensor has larger tiles, because each tile of a reduction has its own results.
constexpr int64_t kMinTile = 32768;
constexpr int64_t kMaxTiles = 256;

constexpr int64_t kMinRun = 4096;      // adjacent elements; reading fewer is inefficient
constexpr int64_t kAloneSize = 32768;  // a smaller pass ends before another thread has woken up

// Returns the size of even blocks, as many as there would be blocks of `step`, rounded up to a
// multiple of `multiple`.
int64_t EvenStep(int64_t size, int64_t step, int64_t multiple) {
  const int64_t even = CeilDiv(size, CeilDiv(size, step));
  return std::min(size, CeilDiv(even, multiple) * multiple);
}

struct Partition {
  Layout layout;
  int64_t outer_step, channel_step, inner_step;
  int64_t outer_blocks, channel_blocks, inner_blocks;

  // The layout must not be empty.
  explicit Partition(const Layout& all) : layout(all), inner_step(all.inner) {
    const int64_t target = std::max(kMinTile, CeilDiv(layout.Size(), kMaxTiles));
    if (layout.inner < kMinPlane) {
      const int64_t max = kMaxColumns / layout.inner;
      const int64_t multiple = max % 16 == 0 ? 16 : 1;  // EvenStep must not exceed `max`
      channel_step =
          max >= layout.channels ? layout.channels : EvenStep(layout.channels, max, multiple);
    } else {
      inner_step = EvenStep(layout.inner, target, 64);
      channel_step = std::clamp<int64_t>(kMinRun / inner_step, 1, layout.channels);
    }
    const int64_t run = channel_step * inner_step;
    outer_step = EvenStep(layout.outer, std::clamp<int64_t>(target / run, 1, layout.outer), 1);
    if (layout.inner >= kMinPlane && outer_step == layout.outer) {
      channel_step =
          std::clamp(target / (layout.outer * inner_step), channel_step, layout.channels);
    }
    outer_blocks = CeilDiv(layout.outer, outer_step);
    channel_blocks = CeilDiv(layout.channels, channel_step);
    inner_blocks = CeilDiv(layout.inner, inner_step);
  }

  int64_t Tiles() const { return outer_blocks * channel_blocks * inner_blocks; }

  // A partial result has numbers of all channels. Its tiles have the same outer and inner range.
  int64_t Partials() const { return outer_blocks * inner_blocks; }

  // Returns the index of the partial result that a tile is part of.
  int64_t PartialOf(int64_t index) const {
    return index / (inner_blocks * channel_blocks) * inner_blocks + index % inner_blocks;
  }

  // Returns the number of elements of a channel in a partial result.
  int64_t Count(int64_t partial) const {
    const int64_t outer_begin = partial / inner_blocks * outer_step;
    const int64_t inner_begin = partial % inner_blocks * inner_step;
    return std::min(outer_step, layout.outer - outer_begin) *
           std::min(inner_step, layout.inner - inner_begin);
  }

  Tile At(int64_t index) const {
    const int64_t inner_begin = index % inner_blocks * inner_step;
    const int64_t channel_begin = index / inner_blocks % channel_blocks * channel_step;
    const int64_t outer_begin = index / inner_blocks / channel_blocks * outer_step;
    return {layout.channels * layout.inner,
            layout.inner,
            outer_begin,
            std::min(outer_begin + outer_step, layout.outer),
            channel_begin,
            std::min(channel_begin + channel_step, layout.channels),
            inner_begin,
            std::min(inner_begin + inner_step, layout.inner)};
  }
};

// Calls on_tile(index) for every tile.
template <typename OnTile>
void ForEachTile(const Partition& partition, const OnTile& on_tile) {
  const int64_t tiles = partition.Tiles();
  if (partition.layout.Size() > kAloneSize) return ParallelFor(tiles, std::cref(on_tile));
  for (int64_t index = 0; index < tiles; ++index) on_tile(index);
}

// Returns the widest instruction set that this build and this machine have, limited by the variable
// GLUON_SYNCBN_INSTRUCTION_SET ("generic", "avx2", "avx512").
const Isa* Detect() {
  const char* variable = std::getenv("GLUON_SYNCBN_INSTRUCTION_SET");
  const std::string limit = variable == nullptr ? "" : variable;
  if (limit == kGeneric.name) return &kGeneric;
#if defined(SYNCBN_WIDE_KERNELS)
  // Every processor with AVX2 has F16C, which this function of older compilers cannot check.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 && limit != kAvx2.name ? &kAvx512 : &kAvx2;
  }
#endif
  return &kGeneric;
}

const Isa& TheIsa() {
  static const Isa* const isa = Detect();
  return *isa;
}

// Calls merge(c, done, count, first, second) for each partial result, in order, and each channel c:
// first and second are its numbers of `count` elements, after `done` elements were merged.
template <typename Merge>
void Reduce(const ReductionPass& pass, ReduceTile reduce, const Merge& merge) {
  const int64_t channels = pass.layout.channels;
  std::fill_n(pass.first, channels, 0.0);
  std::fill_n(pass.second, channels, 0.0);
  if (pass.layout.Size() == 0) return;
  const Partition partition(pass.layout);
  std::vector<double> partials(static_cast<size_t>(2 * partition.Partials() * channels));
  const auto of_partial = [&](int64_t partial) { return &partials[2 * partial * channels]; };
  ForEachTile(partition, [&](int64_t index) {
    double* const first = of_partial(partition.PartialOf(index));
    reduce(pass, partition.At(index), first, first + channels);
  });
  double done = 0;
  for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
    const double* const first = of_partial(partial);
    const double count = static_cast<double>(partition.Count(partial));
    for (int64_t c = 0; c < channels; ++c) merge(c, done, count, first[c], first[channels + c]);
    done += count;
  }
}

void Map(const ElementwisePass& pass, MapTile map) {
  if (pass.layout.Size() == 0) return;
  const Partition partition(pass.layout);
  ForEachTile(partition, [&](int64_t index) { map(pass, partition.At(index)); });
}

}  // namespace

void LocalMoments(const ReductionPass& pass) {
  const auto merge = [&](int64_t c, double done, double count, double mean, double m2) {
    const Moments merged = Merge({done, pass.first[c], pass.second[c]}, {count, mean, m2});
    pass.first[c] = merged.mean;
    pass.second[c] = merged.m2;
  };
  Reduce(pass, TheIsa().moments(pass), merge);
}

void BackwardSums(const ReductionPass& pass) {
  const auto add = [&](int64_t c, double /*done*/, double /*count*/, double dz,
                       double dz_centered) {
    pass.first[c] += dz;
    pass.second[c] += dz_centered;
  };
  Reduce(pass, TheIsa().sums(pass), add);
  for (int64_t c = 0; c < pass.layout.channels && pass.from_output; ++c) {
    pass.second[c] /= pass.scale[c];
  }
}

void Normalize(const ElementwisePass& pass) { Map(pass, TheIsa().normalize(pass)); }

void BackwardApply(const ElementwisePass& pass) { Map(pass, TheIsa().apply(pass)); }

const char* InstructionSet() { return TheIsa().name; }

}  // namespace syncbn::cpu
