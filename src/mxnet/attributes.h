// The attributes of a node `Custom(op_type="gluon_syncbn")`, as strings in a symbol's JSON.
// Who uses it: custom_op.cc; batch_norm.py writes them.
#pragma once
#include <string>

#include "op/sync_batch_norm.h"

namespace syncbn {

struct Attributes {
  std::string group;  // key in the Registry
  std::string layer;  // the block's name, for messages
  // Which guard against MXNet's early release of oneDNN copies the graph has, see
  // gluon_syncbn/_tracing.py. "any": one for every mode; "static_shape": one that is only enough
  // with static_shape=True; "gpu": none, the graph was traced for GPU contexts.
  std::string guard = "any";
  bool chained = false;  // whether there is a fourth input, see custom_op.cc
  Options options;
};

// Throws Error that names the attribute, the value and what is expected.
Attributes ParseAttributes(int size, const char** keys, const char** values);

}  // namespace syncbn
