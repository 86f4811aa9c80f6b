// The passes on the CPU. Tiles depend on the shape of the tensor, not on the number of threads, and
// their results are merged in order, so results are the same in every run.
#include "kernels/cpu/tiles.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "core/environment.h"
#include "core/parallel_for.h"

namespace syncbn::cpu {
namespace {

// A tile has about this many elements, because 128 KiB of float32 fit into the cache of a core. A
// large tensor has larger tiles, because each tile of a reduction needs memory for its results.
constexpr int64_t kMinTile = 32768;
constexpr int64_t kMaxTiles = 256;

constexpr int64_t kMinRun = 4096;      // adjacent elements; reading fewer is inefficient
constexpr int64_t kAloneSize = 32768;  // a smaller pass ends before another thread has woken up

// Divides `size` evenly into as few blocks of at most `step` as possible. Returns the size of a
// block, rounded up to a multiple of `multiple`.
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
    if (layout.block > 1) {
      channel_step = layout.block;
      inner_step = EvenStep(layout.inner, target / layout.block, 1);
    } else if (layout.inner < kMinPlane) {  // tiles.h describes this case
      const int64_t max = kMaxColumns / layout.inner;
      const int64_t multiple = max % 16 == 0 ? 16 : 1;  // rounding up must not exceed `max`
      channel_step =
          max >= layout.channels ? layout.channels : EvenStep(layout.channels, max, multiple);
    } else {
      inner_step = EvenStep(layout.inner, target, 64);
      channel_step = std::clamp<int64_t>(kMinRun / inner_step, 1, layout.channels);
    }
    const int64_t run = channel_step * inner_step;
    outer_step = EvenStep(layout.outer, std::clamp<int64_t>(target / run, 1, layout.outer), 1);
    if (layout.block == 1 && layout.inner >= kMinPlane && outer_step == layout.outer) {
      channel_step =
          std::clamp(target / (layout.outer * inner_step), channel_step, layout.channels);
    }
    outer_blocks = CeilDiv(layout.outer, outer_step);
    channel_blocks = CeilDiv(layout.channels, channel_step);
    inner_blocks = CeilDiv(layout.inner, inner_step);
  }

  int64_t Tiles() const { return outer_blocks * channel_blocks * inner_blocks; }

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
            std::min(inner_begin + inner_step, layout.inner),
            layout.block};
  }
};

template <typename OnTile>
void ForEachTile(const Partition& partition, const OnTile& on_tile) {
  const int64_t tiles = partition.Tiles();
  if (partition.layout.Size() > kAloneSize) return ParallelFor(tiles, std::cref(on_tile));
  for (int64_t index = 0; index < tiles; ++index) on_tile(index);
}

// Returns the widest instruction set that this build and this machine have, limited by the variable
// GLUON_SYNCBN_INSTRUCTION_SET ("generic", "avx2", "avx512").
const Isa* Detect() {
  constexpr char kLimit[] = "GLUON_SYNCBN_INSTRUCTION_SET";
  if (IsSet(kLimit, kGeneric.name)) return &kGeneric;
#if defined(SYNCBN_WIDE_KERNELS)
  // Every processor with AVX2 has F16C, for which older compilers have no __builtin_cpu_supports.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 && !IsSet(kLimit, kAvx2.name) ? &kAvx512 : &kAvx2;
  }
#endif
  return &kGeneric;
}

const Isa& TheIsa() {
  static const Isa* const isa = Detect();
  return *isa;
}

// Calls merge(c, done, count, first, second) for each channel c of each tile, in order. `first` and
// `second` are the tile's results from `count` elements. Earlier calls have merged `done` elements.
template <typename Merge>
void Reduce(const ReductionPass& pass, ReduceTile reduce, const Merge& merge) {
  const int64_t channels = pass.layout.channels;
  std::fill_n(pass.first, channels, 0.0);
  std::fill_n(pass.second, channels, 0.0);
  if (pass.layout.Size() == 0) return;
  const Partition partition(pass.layout);
  const int64_t step = partition.channel_step;
  std::vector<double> results(static_cast<size_t>(2 * step * partition.Tiles()));
  const auto first_of = [&](int64_t index, const Tile& tile) {
    return &results[2 * step * index - tile.channel_begin];
  };
  ForEachTile(partition, [&](int64_t index) {
    const Tile tile = partition.At(index);
    double* const first = first_of(index, tile);
    reduce(pass, tile, first, first + step);
  });
  for (int64_t index = 0; index < partition.Tiles(); ++index) {
    const Tile tile = partition.At(index);
    const double* const first = first_of(index, tile);
    const int64_t outer = tile.outer_end - tile.outer_begin;
    const int64_t done = tile.outer_begin * tile.inner + outer * tile.inner_begin;
    const int64_t count = outer * (tile.inner_end - tile.inner_begin);
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      merge(c, double(done), double(count), first[c], first[step + c]);
    }
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

void ChangeBlock(const Layout& layout, const float* in, int64_t block, float* out) {
  // A group of channels is a block of the input or of the output, so it is contiguous in both.
  const int64_t group = std::max(layout.block, block), groups = layout.channels / group;
  const auto index = [&](int64_t per_block, int64_t c, int64_t i) {
    return c / per_block * per_block * layout.inner + i * per_block + c % per_block;
  };
  ParallelFor(layout.outer * groups, [&](int64_t number) {
    constexpr int64_t kStep = 16;  // elements of a channel that are copied before the next channel
    const int64_t at = number * group * layout.inner;
    for (int64_t begin = 0; begin < layout.inner; begin += kStep) {
      const int64_t end = std::min(begin + kStep, layout.inner);
      for (int64_t c = 0; c < group; ++c) {
        const float* const from = in + at + index(layout.block, c, 0);
        float* const to = out + at + index(block, c, 0);
        for (int64_t i = begin; i < end; ++i) to[i * block] = from[i * layout.block];
      }
    }
  });
}

const char* InstructionSet() { return TheIsa().name; }

}  // namespace syncbn::cpu
