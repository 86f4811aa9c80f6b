// The source of a backend's memory, apart from its tensors.
// Who uses it: op/cuda takes memory; mxnet/memory.cc gives it MXNet's.
#pragma once
#include <cstddef>
#include <memory>

#include "collective/devices/device.h"

namespace syncbn {

// Of the device; or pinned memory of the host, which the device reaches under the same address.
enum class MemoryKind { kDevice, kPinned };

// At least `bytes` with any contents. They are freed with the last copy of the pointer, when no
// work may use them any more. May leave the thread with another current device.
// Throws DeviceError.
using Allocator = std::shared_ptr<void> (*)(const Device& device, MemoryKind kind, size_t bytes);

}  // namespace syncbn
