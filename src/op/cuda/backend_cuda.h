// A GPU as a backend of the layer.
// Who uses it: op/backend.cc, in builds with CUDA.
#pragma once
#include <memory>

#include "op/backend.h"

namespace syncbn {

// Throws Error if the process sees no GPU of this number.
std::unique_ptr<Backend> MakeCudaBackend(const Device& device);

}  // namespace syncbn
