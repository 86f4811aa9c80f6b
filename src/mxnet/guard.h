// The guard of a graph against MXNet's early release of oneDNN copies, as its layer's node names it:
// gluon_syncbn/layer/layout_guard.py chooses one. A graph with a guard for one mode or kind of device
// refuses to run in another, where its results would be wrong.
//   "any"            for every mode
//   "static_shape"   enough with static_shape=True only
//   "outside"        the layer's own call guards it
//   "gpu"            none: the graph was traced for GPU contexts
#pragma once
#include "collective/devices/device.h"
#include "mxnet/attributes.h"

namespace syncbn {

// Throws Error if a graph of these attributes must not run on the device.
void CheckGuard(const Attributes& attributes, const Device& device);

}  // namespace syncbn
