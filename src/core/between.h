// What a caller does between two passes over a tensor for channels [begin, end): it makes what the second
// needs out of what the first has found.
// Who uses it: the CPU kernels and op.
#pragma once
#include <cstdint>
#include <functional>

namespace syncbn {

using Between = std::function<void(int64_t begin, int64_t end)>;

}  // namespace syncbn
