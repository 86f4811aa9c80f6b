// The CPU as a backend of the layer.
// Who uses it: op/backend.cc.
#pragma once
#include <memory>

#include "op/backend.h"

namespace syncbn {

std::unique_ptr<Backend> MakeCpuBackend();

}  // namespace syncbn
