// The sizes of blocks' work; see partition.h. The constants trade bytes in flight against the
// latency of merging partial results.
#include "kernels/cuda/partition.h"

#include <algorithm>

namespace syncbn::cuda {
namespace {

// Vectors of a block: at least 4 a thread, and 16 where that leaves no multiprocessor idle; more
// where there would be more than this many rounds of blocks.
constexpr int64_t kFewSlots = 4 * kPlanesThreads;
constexpr int64_t kManySlots = 16 * kPlanesThreads;
constexpr int64_t kRounds = 8;

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
  cut.whole = misalign == 0 && layout.inner % width == 0;
  cut.plane_step = layout.channels * layout.inner;
  cut.slots = cut.whole ? layout.inner / width : (layout.inner + 2 * (width - 1)) / width;
  const int64_t per_channel = layout.outer * cut.slots;
  if (per_channel == 0) {
    cut.outer_step = 0;
    return cut;
  }

  // Fused kernels, of which fewer blocks run at once, take the same cut.
  const int64_t at_once = int64_t{multiprocessors} * ResidentPlanes(false);
  const int64_t total = per_channel * layout.channels;
  // As many blocks as fill whole rounds, rounded down: a few more would need another round.
  const int64_t rounds = std::clamp<int64_t>(CeilDiv(total, at_once * kManySlots), 1, kRounds);
  const int64_t splits = std::max<int64_t>(at_once * rounds / layout.channels, 1);
  int64_t wanted = std::max(kFewSlots, CeilDiv(per_channel, splits));
  if (layout.channels > kCounters) wanted = per_channel;
  const int64_t most_items = int64_t{1} << 30;
  wanted = std::min(wanted, most_items);
  // Parts as even as can be, so that no block works much longer than the rest.
  cut.slot_blocks = static_cast<int>(CeilDiv(cut.slots, wanted));
  cut.slot_step = CeilDiv(cut.slots, cut.slot_blocks);
  cut.outer_blocks = static_cast<int>(
      CeilDiv(layout.outer, std::clamp<int64_t>(wanted / cut.slot_step, 1, layout.outer)));
  cut.outer_step = CeilDiv(layout.outer, cut.outer_blocks);
  cut.outer_blocks = static_cast<int>(CeilDiv(layout.outer, cut.outer_step));
  cut.by_slot_step = Divider(static_cast<uint32_t>(cut.slot_step));
  return cut;
}

Columns CutColumns(const Layout& layout, int width, int64_t blocks) {
  Columns cut;
  cut.layout = layout;
  cut.width = width;
  if (layout.channels == 0 || layout.inner == 0) return cut;
  const int64_t unit = ChannelUnit(layout.inner, width);
  const int64_t most = std::max<int64_t>(kMostTileSlots * width / (unit * layout.inner), 1);
  const int64_t units = CeilDiv(layout.channels, unit);
  const int64_t tile_units = CeilDiv(units, CeilDiv(units, most));
  cut.tile_channels = static_cast<int>(std::min(tile_units * unit, layout.channels));
  cut.tiles = static_cast<int>(CeilDiv(layout.channels, cut.tile_channels));
  cut.tile_slots = static_cast<int>(cut.tile_channels * layout.inner / width);
  cut.rows = kColumnsThreads / cut.tile_slots;
  cut.row_step = cut.rows * layout.channels * layout.inner;
  const int64_t most_splits = CeilDiv(layout.outer, cut.rows * kFewRows);
  // Rounded down: a few blocks more than run at once would take as long as all others.
  int64_t splits = std::clamp<int64_t>(blocks / cut.tiles, 1, std::max<int64_t>(most_splits, 1));
  if (cut.tiles > kCounters) splits = 1;
  cut.outer_step = std::max<int64_t>(CeilDiv(layout.outer, splits), 1);
  cut.outer_blocks = static_cast<int>(std::max<int64_t>(CeilDiv(layout.outer, cut.outer_step), 1));
  return cut;
}

}  // namespace syncbn::cuda
