// Memory from MXNet's pools.
#pragma once
#include "op/backend.h"

namespace syncbn {

// An Allocator.
std::shared_ptr<void> AllocateFromMxnet(const Device& device, MemoryKind kind, size_t bytes);

}  // namespace syncbn
