// Runs of a channel are copied whole; channels-last tensors, element by element.
#include "kernels/cpu/channels_cpu.h"

#include <algorithm>
#include <cstring>

#include "core/parallel_for.h"

namespace syncbn::cpu {
namespace {

constexpr int64_t kBlock = 16384;  // elements of one task, about

// Calls copy(offset in the tensor, offset in the compact one) for each run, in elements.
template <typename Copy>
void ForEachRun(const Layout& layout, const std::vector<int64_t>& channels, const Copy& copy) {
  const int64_t count = static_cast<int64_t>(channels.size());
  const int64_t step = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, count * layout.inner));
  ParallelFor((layout.outer + step - 1) / step, [&](int64_t task) {
    const int64_t end = std::min(layout.outer, (task + 1) * step);
    for (int64_t outer = task * step; outer < end; ++outer) {
      for (int64_t k = 0; k < count; ++k) {
        copy((outer * layout.channels + channels[static_cast<size_t>(k)]) * layout.inner,
             (outer * count + k) * layout.inner);
      }
    }
  });
}

// A copy of fixed size is one instruction.
template <typename Copy>
void WithSize(DType dtype, int64_t inner, const Copy& copy) {
  const size_t size = SizeOf(dtype);
  const size_t bytes = size * static_cast<size_t>(inner);
  if (bytes == 2) return copy([](char* to, const char* from) { std::memcpy(to, from, 2); });
  if (bytes == 4) return copy([](char* to, const char* from) { std::memcpy(to, from, 4); });
  if (bytes == 8) return copy([](char* to, const char* from) { std::memcpy(to, from, 8); });
  copy([bytes](char* to, const char* from) { std::memcpy(to, from, bytes); });
}

}  // namespace

void GatherChannels(DType dtype, const void* tensor, const Layout& layout,
                    const std::vector<int64_t>& channels, void* compact) {
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  const char* from = static_cast<const char*>(tensor);
  char* to = static_cast<char*>(compact);
  WithSize(dtype, layout.inner, [&](const auto& copy) {
    ForEachRun(layout, channels, [&](int64_t at, int64_t compact_at) {
      copy(to + compact_at * size, from + at * size);
    });
  });
}

void ScatterChannels(DType dtype, const void* compact, const Layout& layout,
                     const std::vector<int64_t>& channels, void* tensor) {
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  const char* from = static_cast<const char*>(compact);
  char* to = static_cast<char*>(tensor);
  WithSize(dtype, layout.inner, [&](const auto& copy) {
    ForEachRun(layout, channels, [&](int64_t at, int64_t compact_at) {
      copy(to + at * size, from + compact_at * size);
    });
  });
}

}  // namespace syncbn::cpu
