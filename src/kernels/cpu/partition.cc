// The sizes of tiles; see partition.h.
#include "kernels/cpu/partition.h"

#include <algorithm>

namespace syncbn::cpu {
namespace {

// A tile of 128 KiB of float32 takes about 10 us, which hides handing it over, and stays in a
// core's cache. Large tensors have larger tiles, so that partial results remain few.
constexpr int64_t kMinTile = 32768;
constexpr int64_t kMaxTiles = 256;

// Shorter runs of memory than this are not read efficiently.
constexpr int64_t kMinRun = 4096;

// As even as can be, in as many blocks as steps of `step` need.
int64_t EvenStep(int64_t size, int64_t step, int64_t multiple) {
  const int64_t even = CeilDiv(size, CeilDiv(size, step));
  return std::min(size, CeilDiv(even, multiple) * multiple);
}

}  // namespace

Partition Cut(const Layout& layout) {
  const int64_t target = std::max(kMinTile, CeilDiv(layout.Size(), kMaxTiles));
  Partition p;
  p.layout = layout;
  p.inner_step = layout.inner;
  if (layout.inner < kMinPlane) {
    // Rounding up to whole vectors must not pass the most, so only where the most is one.
    const int64_t max = kMaxColumns / layout.inner;
    const int64_t multiple = max % 16 == 0 ? 16 : 1;
    p.channel_step =
        max >= layout.channels ? layout.channels : EvenStep(layout.channels, max, multiple);
  } else {
    p.inner_step = EvenStep(layout.inner, target, 64);
    p.channel_step = std::clamp<int64_t>(kMinRun / p.inner_step, 1, layout.channels);
  }
  const int64_t run = p.channel_step * p.inner_step;
  p.outer_step = EvenStep(layout.outer, std::clamp<int64_t>(target / run, 1, layout.outer), 1);
  if (layout.inner >= kMinPlane && p.outer_step == layout.outer) {
    p.channel_step = std::clamp(target / (layout.outer * p.inner_step), p.channel_step,
                                layout.channels);
  }
  p.outer_blocks = CeilDiv(layout.outer, p.outer_step);
  p.channel_blocks = CeilDiv(layout.channels, p.channel_step);
  p.inner_blocks = CeilDiv(layout.inner, p.inner_step);
  return p;
}

int64_t Partition::PartialOf(int64_t index) const {
  return index / (inner_blocks * channel_blocks) * inner_blocks + index % inner_blocks;
}

int64_t Partition::Count(int64_t partial) const {
  const int64_t outer_begin = partial / inner_blocks * outer_step;
  const int64_t inner_begin = partial % inner_blocks * inner_step;
  return std::min(outer_step, layout.outer - outer_begin) *
         std::min(inner_step, layout.inner - inner_begin);
}

Tile Partition::At(int64_t index) const {
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

}  // namespace syncbn::cpu
