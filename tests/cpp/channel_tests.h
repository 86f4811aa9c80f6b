// Checks the kernels that copy some channels side by side and back, over dtypes, layouts and
// alignments. `Kernels` has Gather(dtype, tensor, layout, channels, compact), and Scatter.
// Who uses it: test_kernels.cc and test_cuda_kernels.cc.
#pragma once
#include <cmath>
#include <numeric>
#include <vector>

#include "check.h"
#include "tensor.h"

namespace test {

// Small integers, which every dtype holds; an element nearly tells its place by its value.
inline Tensor Numbered(syncbn::DType dtype, int64_t size, int misalign) {
  Tensor tensor(dtype, size, misalign);
  for (int64_t i = 0; i < size; ++i) tensor.Set(i, static_cast<double>(i % 251));
  return tensor;
}

template <typename Kernels>
void TestChannels(syncbn::DType dtype, const syncbn::Layout& layout, int misalign,
                  const std::vector<int64_t>& channels) {
  const std::string label =
      syncbn::Concat(syncbn::Name(dtype), " ", Describe(layout), " misaligned by ", misalign,
                     ", channels: ", channels.size());
  const int64_t count = static_cast<int64_t>(channels.size());
  Tensor tensor = Numbered(dtype, layout.Size(), misalign), back(dtype, layout.Size(), misalign);
  Tensor compact(dtype, layout.outer * count * layout.inner);
  Kernels::Gather(dtype, tensor.data(), layout, channels, compact.data());
  Kernels::Scatter(dtype, compact.data(), layout, channels, back.data());
  CHECK(compact.Guarded() && back.Guarded(), label);
  std::vector<int64_t> place(static_cast<size_t>(layout.channels), -1);
  for (int64_t k = 0; k < count; ++k) place[channels[k]] = k;
  for (int64_t i = 0; i < layout.Size(); ++i) {
    const int64_t run = i / layout.inner, inner = i % layout.inner;
    const int64_t outer = run / layout.channels, k = place[run % layout.channels];
    if (k < 0) {
      CHECK(std::isnan(back.Get(i)), label);
      continue;
    }
    CHECK_EQ(compact.Get((outer * count + k) * layout.inner + inner), tensor.Get(i), label);
    CHECK_EQ(back.Get(i), tensor.Get(i), label);
  }
}

template <typename Kernels>
void TestAllChannels() {
  for (syncbn::DType dtype : kDTypes) {
    for (const syncbn::Layout& layout :
         {syncbn::Layout{1, 1, 1}, {3, 5, 7}, {2, 5, 8}, {300, 40, 1}, {2, 6, 1023}, {1, 3, 40001},
          {20, 40, 16}, {0, 3, 4}, {4, 3, 0}}) {
      std::vector<int64_t> all(static_cast<size_t>(layout.channels));
      std::iota(all.begin(), all.end(), int64_t{0});
      for (int misalign : {0, 1}) {
        TestChannels<Kernels>(dtype, layout, misalign, all);
        TestChannels<Kernels>(dtype, layout, misalign, {layout.channels - 1});
        if (layout.channels > 3) TestChannels<Kernels>(dtype, layout, misalign, {0, 2, 3});
      }
    }
  }
}

}  // namespace test
