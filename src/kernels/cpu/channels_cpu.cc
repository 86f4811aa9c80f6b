// Runs of a channel are copied whole; channels-last tensors, element by element.
#include "kernels/cpu/channels_cpu.h"

#include <algorithm>
#include <cstring>

#include "core/parallel_for.h"

namespace syncbn::cpu {
namespace {

constexpr int64_t kBlock = 16384;  // elements of one task, about

// Calls copy(number of the run in the tensor, in the compact one) for each run.
template <typename Copy>
void ForEachRun(const Layout& layout, const std::vector<int64_t>& channels, const Copy& copy) {
  const int64_t count = static_cast<int64_t>(channels.size());
  const int64_t step = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, count * layout.inner));
  ParallelFor(CeilDiv(layout.outer, step), [&](int64_t task) {
    const int64_t end = std::min(layout.outer, (task + 1) * step);
    for (int64_t outer = task * step; outer < end; ++outer) {
      for (int64_t k = 0; k < count; ++k) {
        copy(outer * layout.channels + channels[static_cast<size_t>(k)], outer * count + k);
      }
    }
  });
}

// A copy of fixed size is one instruction.
template <typename Use>
void WithCopy(int64_t bytes, const Use& use) {
  if (bytes == 2) return use([](char* to, const char* from) { std::memcpy(to, from, 2); });
  if (bytes == 4) return use([](char* to, const char* from) { std::memcpy(to, from, 4); });
  if (bytes == 8) return use([](char* to, const char* from) { std::memcpy(to, from, 8); });
  const size_t size = static_cast<size_t>(bytes);
  use([size](char* to, const char* from) { std::memcpy(to, from, size); });
}

// From the tensor with this layout to the compact one, or else back.
template <bool kGather>
void CopyChannels(DType dtype, const Layout& layout, const std::vector<int64_t>& channels,
                  const void* source, void* target) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
  const int64_t bytes = layout.inner * static_cast<int64_t>(SizeOf(dtype));  // of a run
  WithCopy(bytes, [&](const auto& copy) {
    ForEachRun(layout, channels, [&](int64_t whole, int64_t compact) {
      copy(to + (kGather ? compact : whole) * bytes, from + (kGather ? whole : compact) * bytes);
    });
  });
}

}  // namespace

void GatherChannels(DType dtype, const void* tensor, const Layout& layout,
                    const std::vector<int64_t>& channels, void* compact) {
  CopyChannels<true>(dtype, layout, channels, tensor, compact);
}

void ScatterChannels(DType dtype, const void* compact, const Layout& layout,
                     const std::vector<int64_t>& channels, void* tensor) {
  CopyChannels<false>(dtype, layout, channels, compact, tensor);
}

}  // namespace syncbn::cpu
