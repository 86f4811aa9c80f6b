// The operator `Custom(op_type="gluon_syncbn")` of MXNet.
// Who uses it: python_api.cc registers it once.
#pragma once
#include <cstdint>

namespace syncbn {

// LoadMxnetApi has to come first. Throws Error if MXNet refuses.
void RegisterCustomOp();

// The number of operators made so far that are a layer's first on their device, or of a graph with
// static_shape: after these Devices.map waits once, see devices.py.
int64_t FirstOperators();

}  // namespace syncbn
