// Memory from CUDA's runtime for programs without a pool of their own, kept until the process ends.
// Who uses it: backend_cuda.cc, for tests and benchmarks without MXNet.
#pragma once
#include "op/allocator.h"

namespace syncbn::cuda {

// An Allocator; `device` is the current one. Memory that goes back serves later requests and is
// never freed, because freeing waits for all work of the device.
std::shared_ptr<void> AllocateFromPool(const Device& device, MemoryKind kind, size_t bytes);

}  // namespace syncbn::cuda
