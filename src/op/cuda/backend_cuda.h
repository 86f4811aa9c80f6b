// A GPU as a backend of the layer.
// Who uses it: op/backend.cc, in builds with CUDA.
#pragma once
#include <memory>

#include "op/backend.h"

namespace syncbn {

// Throws Error if the process sees no GPU of this number. Without an allocator memory is that of
// memory_pool.h.
std::unique_ptr<Backend> MakeCudaBackend(const Device& device, Allocator allocator = nullptr);

}  // namespace syncbn
