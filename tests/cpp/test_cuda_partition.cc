// Tests the cut of a tensor for a GPU: either way, every element is visited exactly once, by
// vectors that lie on vector boundaries. Sizes beyond 2^31 are sampled.
#include <algorithm>
#include <vector>

#include "check.h"
#include "kernels/cuda/partition.h"
#include "tensor.h"

namespace cuda = syncbn::cuda;
using syncbn::Layout;

namespace {

constexpr int kMultiprocessors = 5;

std::string Label(const Layout& layout, int width, int misalign) {
  return syncbn::Concat(test::Describe(layout), " width ", width, " misaligned by ", misalign);
}

void TestDivider() {
  for (uint32_t by : {1u, 2u, 3u, 7u, 10u, 255u, 256u, 641u, 65537u, 1u << 30, (1u << 30) + 1}) {
    const cuda::Divider divider(by);
    for (uint32_t n : {0u, 1u, by - 1, by, by + 1, 3 * by - 1, 123456789u, (1u << 31) - 1}) {
      if (n < 1u << 31) CHECK_EQ(divider.Quotient(n), n / by, n, " by ", by);
    }
  }
}

template <bool kWhole>
void TestSlots(const cuda::Planes& cut, const std::string& label) {
  const Layout layout = cut.layout;
  std::vector<int> visits(static_cast<size_t>(layout.Size()));
  for (int64_t index = 0; index < cut.Blocks(); ++index) {
    const cuda::Planes::Block block = cut.At(static_cast<uint32_t>(index));
    CHECK(block.split < cut.splits && block.channel < layout.channels, label);
    for (int item = 0; item < block.items; ++item) {
      const cuda::Slot slot = cut.SlotOf<kWhole>(block, item);
      if (slot.begin >= slot.end) continue;
      CHECK(slot.begin >= 0 && slot.end <= cut.width, label);
      CHECK_EQ((slot.offset + cut.misalign) % cut.width, 0, label);
      for (int64_t i = slot.offset + slot.begin; i < slot.offset + slot.end; ++i) {
        ++visits.at(static_cast<size_t>(i));
        CHECK_EQ(i / layout.inner % layout.channels, block.channel, label);
      }
    }
    const cuda::Slot beyond = cut.SlotOf<kWhole>(block, block.items);
    CHECK(beyond.begin >= beyond.end, label);
  }
  for (int count : visits) CHECK_EQ(count, 1, label);
}

void TestPlanes(const Layout& layout, int width, int misalign) {
  const std::string label = Label(layout, width, misalign);
  const cuda::Planes cut = cuda::CutPlanes(layout, width, misalign, kMultiprocessors);
  CHECK_EQ(cut.whole, misalign == 0 && layout.inner % width == 0, label);
  TestSlots<false>(cut, label);
  if (cut.whole) TestSlots<true>(cut, label);
}

void TestColumns(const Layout& layout, int width, int64_t blocks) {
  const std::string label = Label(layout, width, 0);
  const cuda::Columns cut = cuda::CutColumns(layout, width, blocks);
  std::vector<int> visits(static_cast<size_t>(layout.Size()));
  CHECK(cut.rows >= 1 && cut.rows * cut.tile_slots <= cuda::kColumnsThreads, label);
  CHECK(cut.tile_channels <= cuda::kMostTileSlots * width, label);
  CHECK(cut.Blocks() <= std::max<int64_t>(blocks, cut.tiles), label, " of ", blocks, " blocks");
  for (int64_t index = 0; index < cut.Blocks(); ++index) {
    const cuda::Columns::Block block = cut.At(static_cast<uint32_t>(index));
    CHECK(block.tile < cut.tiles && block.split < cut.outer_blocks && block.channels > 0, label);
    for (int thread = 0; thread < cuda::kColumnsThreads; ++thread) {
      const cuda::Columns::Place place = cut.PlaceOf(block, thread);
      int64_t offset = place.offset;
      for (int i = 0; i < place.count; ++i, offset += cut.row_step) {
        CHECK_EQ(offset % width, 0, label);
        for (int j = 0; j < width; ++j) {
          const int64_t at = offset + j;
          ++visits.at(static_cast<size_t>(at));
          CHECK_EQ(at / layout.inner % layout.channels,
                   block.channel_begin + (place.column + j) / layout.inner, label);
        }
      }
    }
  }
  for (int count : visits) CHECK_EQ(count, 1, label);
}

// The part of the time of the places for blocks in which there is work, where blocks take as long
// as they have vectors, and a round begins when the one before has ended.
double Share(int64_t channels, int64_t line, int64_t splits, int64_t at_once) {
  const int64_t rounds = syncbn::CeilDiv(channels * splits, at_once);
  return static_cast<double>(channels * line) /
         static_cast<double>(rounds * at_once * syncbn::CeilDiv(line, splits));
}

// At least 85 % have work, unless blocks of kFewSlots or more cannot give that.
void TestShares() {
  // (channels, length of a side) of ResNet-50 for crops of 224, and of DeepLabV3 for 480.
  const std::pair<int64_t, int64_t> layers[] = {
      {64, 112}, {64, 56},   {256, 56},  {128, 56},  {128, 28},  {512, 28}, {256, 28},
      {256, 14}, {64, 240},  {64, 120},  {128, 120}, {256, 120}, {128, 60}, {256, 60},
      {512, 60}, {1024, 60}, {2048, 60}, {21, 60},   {19, 480}};
  for (const auto& [channels, side] : layers) {
    for (int64_t images : {1, 2, 4, 16, 32, 64}) {
      for (int width : {2, 4, 8}) {
        const Layout layout{images, channels, side * side};
        if (cuda::PrefersColumns(layout, width, 16 / width)) continue;
        for (int multiprocessors : {20, 56, 80, 108, 132, 144}) {
          const int64_t at_once = multiprocessors * cuda::kResidentPlanes;
          const cuda::Planes cut = cuda::CutPlanes(layout, width, 0, multiprocessors);
          const int64_t line = images * cut.slots;
          const double share = Share(channels, line, cut.splits, at_once);
          const int64_t most = syncbn::CeilDiv(line, cuda::kFewSlots);
          for (int64_t splits = 1; share < 0.85 && splits <= most; ++splits) {
            CHECK(Share(channels, line, splits, at_once) < 0.85, Label(layout, width, 0), " on ",
                  multiprocessors, " multiprocessors: ", cut.splits, " blocks a channel have ",
                  share, ", and ", splits, " more");
          }
        }
      }
    }
  }
}

// Neighbouring blocks touch, and the last one of a channel ends where its last plane does.
template <bool kWhole>
void TestNeighbours(const cuda::Planes& cut, const std::string& label) {
  const Layout layout = cut.layout;
  CHECK(cut.Blocks() < int64_t{1} << 31, label);
  int64_t next = 0;
  for (int64_t index = 0; index < cut.Blocks(); ++index) {
    const cuda::Planes::Block block = cut.At(static_cast<uint32_t>(index));
    CHECK(block.items > 0 && block.items <= cuda::kMostSlots, label);
    if (block.split == 0) next = block.channel * layout.inner;
    const cuda::Slot first = cut.SlotOf<kWhole>(block, 0);
    CHECK_EQ(first.offset + first.begin, next, label);
    int item = block.items - 1;  // padding of huge planes is behind it
    while (cut.SlotOf<kWhole>(block, item).end == 0) --item;
    const cuda::Slot last = cut.SlotOf<kWhole>(block, item);
    next = last.offset + last.end;
    CHECK_EQ((next - 1) / layout.inner % layout.channels, block.channel, label);
    if (next % layout.inner == 0) next += (layout.channels - 1) * layout.inner;
    const int64_t end = (layout.outer * layout.channels + block.channel) * layout.inner;
    if (block.split + 1 == cut.splits) CHECK_EQ(next, end, label);
  }
}

void TestHuge(const Layout& layout, int width, int misalign) {
  const cuda::Planes cut = cuda::CutPlanes(layout, width, misalign, 132);
  const std::string label = Label(layout, width, misalign);
  if (cut.whole)
    TestNeighbours<true>(cut, label);
  else
    TestNeighbours<false>(cut, label);
}

}  // namespace

int main() {
  TestDivider();
  TestShares();
  const std::vector<Layout> layouts = {
      {1, 1, 1},    {3, 5, 7},     {2, 3, 64},   {2, 3, 65},    {20011, 3, 1}, {7, 1024, 1},
      {3, 1025, 1}, {37, 17, 3},   {4, 6, 1023}, {1, 2, 40001}, {9, 33, 49},   {530, 130, 1},
      {5, 48, 196}, {2, 2, 70001}, {3, 16, 225}, {40, 2, 127},  {1, 9000, 4},  {6, 3, 8192}};
  for (const Layout& layout : layouts) {
    for (int width : {1, 2, 4, 8}) {
      for (int misalign = 0; misalign < width; ++misalign) TestPlanes(layout, width, misalign);
      const int bytes = width == 1 ? 4 : 16 / width;
      if (layout.channels * layout.inner % width != 0) continue;
      if (!cuda::PrefersColumns(layout, width, bytes)) continue;
      for (int64_t blocks : {1, 7, 1000}) TestColumns(layout, width, blocks);
    }
  }
  for (const Layout& layout : {Layout{3, 5, (int64_t{1} << 31) + 8}, Layout{40, 300, 1 << 20},
                               Layout{1, 1, int64_t{1} << 35}, Layout{1 << 20, 1, 4096}}) {
    for (int width : {1, 2, 8}) {
      for (int misalign : {0, width - 1}) TestHuge(layout, width, misalign);
    }
  }
  return check::Result();
}
