// Tests the cut of a tensor for a GPU: either way, every element is visited exactly once, by
// vectors that lie on vector boundaries.
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

template <bool kAligned>
void TestSlots(const cuda::Planes& cut, const std::string& label) {
  const Layout layout = cut.layout;
  std::vector<int> visits(static_cast<size_t>(layout.Size()));
  for (int64_t index = 0; index < cut.Blocks(); ++index) {
    const cuda::Planes::Block block = cut.At(static_cast<uint32_t>(index));
    CHECK(block.split < cut.splits && block.channel < layout.channels, label);
    for (int item = 0; item < block.items; ++item) {
      const cuda::Slot slot = cut.SlotOf<kAligned>(block, item);
      if (slot.begin >= slot.end) continue;
      CHECK(slot.begin >= 0 && slot.end <= cut.width, label);
      CHECK_EQ((slot.offset + cut.misalign) % cut.width, 0, label);
      for (int64_t i = slot.offset + slot.begin; i < slot.offset + slot.end; ++i) {
        ++visits.at(static_cast<size_t>(i));
        CHECK_EQ(i / layout.inner % layout.channels, block.channel, label);
      }
    }
    const cuda::Slot beyond = cut.SlotOf<kAligned>(block, block.items);
    CHECK(beyond.begin >= beyond.end, label);
  }
  for (int count : visits) CHECK_EQ(count, 1, label);
}

void TestPlanes(const Layout& layout, int width, int misalign) {
  const std::string label = Label(layout, width, misalign);
  const cuda::Planes cut = cuda::CutPlanes(layout, width, misalign, kMultiprocessors);
  CHECK_EQ(cut.aligned, misalign == 0 && layout.inner % width == 0, label);
  TestSlots<false>(cut, label);
  if (cut.aligned) TestSlots<true>(cut, label);
}

void TestColumns(const Layout& layout, int width, int64_t blocks) {
  const std::string label = Label(layout, width, 0);
  const cuda::Columns cut = cuda::CutColumns(layout, width, blocks);
  std::vector<int> visits(static_cast<size_t>(layout.Size()));
  CHECK(cut.rows >= 1 && cut.rows * cut.tile_slots <= cuda::kColumnsThreads, label);
  CHECK(cut.tile_channels <= cuda::kMaxTileSlots * width, label);
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

}  // namespace

int main() {
  TestDivider();
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
  return check::Result();
}
