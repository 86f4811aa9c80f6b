// The attributes of a node `Custom(op_type="gluon_syncbn")`, as strings in a symbol's JSON.
// Who uses it: custom_op.cc; batch_norm.py writes them.
#pragma once
#include <string>

#include "op/sync_batch_norm.h"

namespace syncbn {

struct Attributes {
  std::string group;  // key in the Registry
  std::string layer;  // the block's name, for messages
  // Which guard against MXNet's early release of oneDNN copies the graph has (batch_norm.py):
  // "yes": it has one. "static_shape": none, it was traced for static_shape, where none is
  // wanted. "gpu": none, it was traced for GPU contexts.
  std::string guard = "yes";
  Options options;
};

// Throws Error that names the attribute, the value and what is expected.
Attributes ParseAttributes(int size, const char** keys, const char** values);

}  // namespace syncbn
