// A function that a caller has run between two passes, for channels [begin, end): it computes the
// coefficients of the second pass from the results of the first.
// Who uses it: the CPU kernels and op.
#pragma once
#include <cstdint>
#include <functional>

namespace syncbn {

using Between = std::function<void(int64_t begin, int64_t end)>;

}  // namespace syncbn
