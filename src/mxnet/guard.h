// The guard of a graph against MXNet's early release of oneDNN copies, as its layer's node names it:
// gluon_syncbn/layer/layout_guard.py chooses one. A graph with a guard for one mode or kind of device
// refuses to run in another, where its results would be wrong.
//   "any"            for every mode
//   "static_shape"   enough with static_shape=True only
//   "outside"        the layer's own call guards it
//   "gpu"            none: the graph was traced for GPU contexts
// A symbol that was exported has the same attributes as the graph that it was traced for, so only the
// caller of a graph knows its mode.
#pragma once
#include <string>

#include "core/device.h"
#include "mxnet/attributes.h"

namespace syncbn {

// Begins or ends a part of the calling thread that calls graphs of this guard in the right mode.
void CallGuarded(const std::string& guard, bool begins);

// Throws Error if a graph of these attributes must not run on the device.
void CheckGuard(const Attributes& attributes, const Device& device);

}  // namespace syncbn
