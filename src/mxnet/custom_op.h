// The operator `Custom(op_type="gluon_syncbn")` of MXNet.
#pragma once

namespace syncbn {

// LoadMxnetApi must be called first. Throws Error if MXNet refuses.
void RegisterCustomOp();

}  // namespace syncbn
