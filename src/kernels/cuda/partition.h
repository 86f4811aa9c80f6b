// The cut of a tensor into the work of blocks and threads: index arithmetic for host and device,
// without any CUDA, so that a native test can check that every element is visited exactly once. It
// must not know what is computed.
//
// There are two ways to cut. Large planes (contiguous memory of one channel): the vectors of a
// channel's planes are one line, of which a block has a piece, see Planes. Small planes and
// channels-last: a thread keeps to a few neighbouring columns and walks along the outer axis, see
// Columns. Either way a thread reads vectors of `width` elements: 16 bytes where alignment allows,
// else single elements.
#pragma once
#include <cstdint>

#include "core/host_device.h"
#include "core/layout.h"

namespace syncbn::cuda {

constexpr int kPlanesThreads = 256;
constexpr int kColumnsThreads = 256;
// Blocks that a multiprocessor has registers for. `fused` kernels, those backward through an
// activation, need more; where there are fewer than four blocks, threads ask for twice as many
// vectors ahead.
constexpr int kResidentPlanes = 4;
SYNCBN_HOST_DEVICE constexpr int ResidentColumns(int width, bool fused) {
  if (width > 4) return 2;
  return fused && width > 1 ? 3 : 4;
}
SYNCBN_HOST_DEVICE constexpr int UnrollColumns(int width, bool fused, int unroll) {
  return ResidentColumns(width, fused) < 4 ? 2 * unroll : unroll;
}

// Vectors of a block of Planes: about so many at least, and at most, so that 32 bits count them.
constexpr int64_t kFewSlots = 4 * kPlanesThreads;
constexpr int64_t kMaxSlots = int64_t{1} << 30;
// Rounds of blocks that a tensor of planes is cut into at most.
constexpr int64_t kMaxRounds = 16;

// Rounds of vectors after which a thread folds its lanes into totals, see sums.cuh.
constexpr int kFoldEvery = 16;

// Of Columns, unless one channel needs more: wide enough for whole lines of memory, and narrow,
// because the last block of a tile reads the partial results of all its channels.
constexpr int kMaxTileSlots = 8;

// Splitting a channel's sum over blocks takes a counter for each unit that is split.
constexpr int64_t kCounters = 8192;

// Partial results of a tensor at most, for each multiprocessor: those of the blocks of planes, or
// of the tiles of columns, where a tile has at most 16 / ResidentColumns channels for each slot.
constexpr int kMaxPartials = kMaxRounds * kResidentPlanes + 16 * kMaxTileSlots;
constexpr int kPartialBytes = 16;

// Division by a number that is known before the kernel starts, for n < 2^31.
// Granlund and Montgomery: Division by invariant integers using multiplication,
// doi:10.1145/178243.178249.
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  explicit Divider(uint32_t by = 1) : divisor(by) {
    while ((uint64_t{1} << shift) < by) ++shift;
    const uint64_t rest = (uint64_t{1} << shift) - by;
    multiplier = static_cast<uint32_t>((rest << 32) / by + 1);
  }

  SYNCBN_HOST_DEVICE uint32_t Quotient(uint32_t n) const {
    return (static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 32) + n) >> shift;
  }
};

// One vector of memory. Only elements [begin, end) of it belong to the plane.
struct Slot {
  int64_t offset = 0;  // of the vector's first element from the tensor's first
  int begin = 0, end = 0;
};

struct Planes {
  Layout layout;
  int width = 1;
  int misalign = 0;   // elements from the last vector boundary to the tensor's first element
  bool aligned = true;  // no vector belongs to two planes, nor to none in part
  int64_t slots = 1;  // vectors of a plane at most, with those that it shares with its neighbours
  int64_t plane_step = 0;  // elements from a plane to the channel's next
  int64_t step = 0;        // vectors of a block
  int splits = 1;          // blocks of a channel
  Divider by_slots;
  double planes_per_slot = 0;  // a little less: a product is right, or one too small

  SYNCBN_HOST_DEVICE int64_t Blocks() const { return layout.channels * splits; }

  // The work of one block: `items` vectors from its first plane's vector slot_begin + column on.
  struct Block {
    int64_t channel;
    int64_t plane;       // element where its first plane begins
    int64_t slot_begin;  // 0, unless a plane has more than kMaxSlots
    uint32_t column;
    int split, items;
  };

  SYNCBN_HOST_DEVICE Block At(uint32_t index) const {
    Block block;
    block.channel = index / static_cast<uint32_t>(splits);
    block.split = static_cast<int>(index % static_cast<uint32_t>(splits));
    const int64_t begin = block.split * step, left = layout.outer * slots - begin;
    int64_t row = static_cast<int64_t>(static_cast<double>(begin) * planes_per_slot);
    int64_t column = begin - row * slots;
    if (column >= slots) {
      ++row;
      column -= slots;
    }
    block.plane = (row * layout.channels + block.channel) * layout.inner;
    const bool huge = slots > kMaxSlots;
    block.slot_begin = huge ? column : 0;
    block.column = huge ? 0 : static_cast<uint32_t>(column);
    block.items = static_cast<int>(left < step ? left : step);
    return block;
  }

  // The vector of a block's item; empty past the last item.
  // `kAligned` is `aligned`, or false: that is right for every cut, and slower.
  template <bool kAligned>
  SYNCBN_HOST_DEVICE Slot SlotOf(const Block& block, int item) const {
    const uint32_t place = static_cast<uint32_t>(item) + block.column;
    const uint32_t row = by_slots.Quotient(place);
    Slot slot;
    if (kAligned) {
      const uint64_t in_line = uint64_t{place} * static_cast<uint32_t>(width);
      const int64_t skip = plane_step - layout.inner;  // the other channels' planes
      slot.offset = block.plane + row * skip + static_cast<int64_t>(in_line);
      slot.end = item < block.items ? width : 0;
      return slot;
    }
    if (item >= block.items) return slot;
    const uint32_t column = place - row * by_slots.divisor;
    const int64_t begin = block.plane + row * plane_step;
    // `width` is a power of two, so low bits are enough to know where the plane lies in its vector.
    const int shared = static_cast<int>((misalign + begin) & (width - 1));
    const int64_t first = (block.slot_begin + column) * width - shared;
    const int64_t left = layout.inner - first;
    slot.offset = begin + first;
    slot.begin = first < 0 ? static_cast<int>(-first) : 0;
    slot.end = left < width ? static_cast<int>(left < 0 ? 0 : left) : width;
    return slot;
  }
};

struct Columns {
  Layout layout;
  int width = 1;
  int tile_channels = 1;  // of one block
  int tile_slots = 1;     // vectors of one row of the tile
  int rows = 1;           // that a block reads at once
  int64_t row_step = 0;   // elements from a thread's row to its next
  int64_t outer_step = 1;
  int tiles = 1, outer_blocks = 1;
  Divider by_inner, by_rows, by_tile_slots, by_tiles;

  SYNCBN_HOST_DEVICE int64_t Blocks() const { return static_cast<int64_t>(tiles) * outer_blocks; }

  struct Block {
    int64_t channel_begin, outer_begin, outer_end;
    int tile, split, channels;
  };

  SYNCBN_HOST_DEVICE Block At(uint32_t index) const {
    Block block;
    block.split = static_cast<int>(by_tiles.Quotient(index));
    block.tile = static_cast<int>(index) - block.split * tiles;
    block.channel_begin = static_cast<int64_t>(block.tile) * tile_channels;
    const int64_t left = layout.channels - block.channel_begin;
    block.channels = static_cast<int>(left < tile_channels ? left : tile_channels);
    block.outer_begin = block.split * outer_step;
    const int64_t end = block.outer_begin + outer_step;
    block.outer_end = end < layout.outer ? end : layout.outer;
    return block;
  }

  // The vectors of a thread: `count` of them, the first at `offset` from the tensor's first element
  // and each `row_step` after the one before. They are at one column of the tile.
  struct Place {
    int row, column, count;
    int64_t offset;
  };

  SYNCBN_HOST_DEVICE Place PlaceOf(const Block& block, int thread) const {
    Place place;
    place.row = static_cast<int>(by_tile_slots.Quotient(static_cast<uint32_t>(thread)));
    place.column = (thread - place.row * tile_slots) * width;
    const int64_t outer = block.outer_begin + place.row, left = block.outer_end - outer;
    const bool active =
        place.row < rows && place.column < block.channels * layout.inner && left > 0;
    const uint32_t rounded_up = static_cast<uint32_t>(left + rows - 1);
    place.count = active ? static_cast<int>(by_rows.Quotient(rounded_up)) : 0;
    place.offset = (outer * layout.channels + block.channel_begin) * layout.inner + place.column;
    return place;
  }

  SYNCBN_HOST_DEVICE int64_t ChannelOf(const Block& block, int column) const {
    return block.channel_begin + by_inner.Quotient(static_cast<uint32_t>(column));
  }
};

// True if a thread is to keep to columns. `bytes` is the size of an element.
bool PrefersColumns(const Layout& layout, int width, int bytes);

// `misalign` is below `width`. `multiprocessors` are those of the device.
Planes CutPlanes(const Layout& layout, int width, int misalign, int multiprocessors);

// Needs PrefersColumns, and rows of memory whose length is a multiple of `width`. `blocks` is the
// number that is wanted.
Columns CutColumns(const Layout& layout, int width, int64_t blocks);

}  // namespace syncbn::cuda
