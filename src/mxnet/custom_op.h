// The operator `Custom(op_type="gluon_syncbn")` of MXNet.
// Who uses it: python_api.cc registers it once.
#pragma once

namespace syncbn {

// LoadMxnetApi must be called first. Throws Error if MXNet refuses.
void RegisterCustomOp();

}  // namespace syncbn
