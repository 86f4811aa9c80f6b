// Some channels of a tensor, copied side by side and back.
// Who uses it: op/cpu. Pointers and sizes only, as batch_norm_cpu.h.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/layout.h"

namespace syncbn::cpu {

// compact[:, k, :] = tensor[:, channels[k], :]; `layout` is that of `tensor`.
void GatherChannels(DType dtype, const void* tensor, const Layout& layout,
                    const std::vector<int64_t>& channels, void* compact);

// tensor[:, channels[k], :] = compact[:, k, :]
void ScatterChannels(DType dtype, const void* compact, const Layout& layout,
                     const std::vector<int64_t>& channels, void* tensor);

}  // namespace syncbn::cpu
