// The sizes of blocks' work; see partition.h. The constants trade bytes in flight against the
// latency of merging partial results.
#include "kernels/cuda/partition.h"

#include <algorithm>

namespace syncbn::cuda {
namespace {

// Vectors of a block where the tensor has so many for every place of a round, and more where there
// would be more rounds of blocks than kRounds.
constexpr int64_t kManySlots = 16 * kPlanesThreads;
constexpr int64_t kRounds = kMaxRounds / 2;
// The part of the places' time that has to have work; more rounds are tried where it has less.
constexpr double kGoodShare = 0.875;

// Below this many bytes, a plane's first and last vectors, which it shares with its neighbours,
// would cost too much.
constexpr int64_t kMinPlaneBytes = 1024;
// Rows that a thread of Columns reads before another block is worth its partial results.
constexpr int64_t kFewRows = 8;

// Channels that together fill whole vectors.
int64_t ChannelUnit(int64_t inner, int width) {
  int64_t unit = width;
  while (unit > 1 && unit / 2 * inner % width == 0) unit /= 2;
  return unit;
}

}  // namespace

bool PrefersColumns(const Layout& layout, int width, int bytes) {
  return layout.inner * bytes < kMinPlaneBytes &&
         ChannelUnit(layout.inner, width) * layout.inner <= kColumnsThreads * width;
}

Planes CutPlanes(const Layout& layout, int width, int misalign, int multiprocessors) {
  Planes cut;
  cut.layout = layout;
  cut.width = width;
  cut.misalign = misalign;
  cut.aligned = misalign == 0 && layout.inner % width == 0;
  if (layout.Size() == 0) return cut;
  cut.plane_step = layout.channels * layout.inner;
  cut.slots = cut.aligned ? layout.inner / width : (layout.inner + 2 * (width - 1)) / width;
  const int64_t at_once = int64_t{multiprocessors} * kResidentPlanes;
  const int64_t line = layout.outer * cut.slots;
  const int64_t max = layout.channels > kCounters ? 1 : CeilDiv(line, kFewSlots);
  double best = 0;
  int64_t rounds = CeilDiv(line * layout.channels, at_once * kManySlots);
  for (rounds = std::min(rounds, kRounds); rounds <= kMaxRounds && best < kGoodShare; ++rounds) {
    // Rounded down: a few blocks more would need another round.
    const int64_t splits = std::clamp<int64_t>(at_once * rounds / layout.channels, 1, max);
    const int64_t step = CeilDiv(line, splits);
    const int64_t places = CeilDiv(splits * layout.channels, at_once) * at_once;
    const double share = static_cast<double>(line * layout.channels) /
                         (static_cast<double>(places) * static_cast<double>(step));
    if (share <= best) continue;
    best = share;
    cut.step = std::min(step, kMaxSlots);
  }
  if (cut.slots > kMaxSlots) {
    // A plane is cut into whole blocks, which go past its end.
    const int64_t parts = CeilDiv(cut.slots, cut.step);
    cut.step = CeilDiv(cut.slots, parts);
    cut.slots = parts * cut.step;
    cut.aligned = false;
  }
  cut.splits = static_cast<int>(CeilDiv(layout.outer * cut.slots, cut.step));
  cut.planes_per_slot = (1 - 0x1p-50) / static_cast<double>(cut.slots);
  cut.by_slots = Divider(static_cast<uint32_t>(std::min(cut.slots, 2 * kMaxSlots)));
  return cut;
}

Columns CutColumns(const Layout& layout, int width, int64_t blocks) {
  Columns cut;
  cut.layout = layout;
  cut.width = width;
  if (layout.channels == 0 || layout.inner == 0) return cut;
  const int64_t unit = ChannelUnit(layout.inner, width);
  const int64_t max = std::max<int64_t>(kMaxTileSlots * width / (unit * layout.inner), 1);
  const int64_t units = CeilDiv(layout.channels, unit);
  const int64_t tile_units = CeilDiv(units, CeilDiv(units, max));
  cut.tile_channels = static_cast<int>(std::min(tile_units * unit, layout.channels));
  cut.tiles = static_cast<int>(CeilDiv(layout.channels, cut.tile_channels));
  cut.tile_slots = static_cast<int>(cut.tile_channels * layout.inner / width);
  cut.rows = kColumnsThreads / cut.tile_slots;
  cut.row_step = cut.rows * layout.channels * layout.inner;
  const int64_t most_splits = CeilDiv(layout.outer, cut.rows * kFewRows);
  // Rounded down: a few blocks more than run at once would take as long as all others.
  int64_t splits = std::clamp<int64_t>(blocks / cut.tiles, 1, std::max<int64_t>(most_splits, 1));
  if (cut.tiles > kCounters) splits = 1;
  cut.outer_step = std::clamp<int64_t>(CeilDiv(layout.outer, splits), 1, kMaxSlots);
  cut.outer_blocks = static_cast<int>(std::max<int64_t>(CeilDiv(layout.outer, cut.outer_step), 1));
  cut.by_inner = Divider(static_cast<uint32_t>(layout.inner));
  cut.by_rows = Divider(static_cast<uint32_t>(cut.rows));
  cut.by_tile_slots = Divider(static_cast<uint32_t>(cut.tile_slots));
  cut.by_tiles = Divider(static_cast<uint32_t>(cut.tiles));
  return cut;
}

}  // namespace syncbn::cuda
