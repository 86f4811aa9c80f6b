// The attributes of a node `Custom(op_type="gluon_syncbn")`, as strings in a symbol's JSON.
#pragma once
#include <string>

#include "op/sync_batch_norm.h"

namespace syncbn {

struct Attributes {
  std::string layer_key;  // in the Registry
  std::string layer;  // the block's name, for messages
  std::string guard = "any";  // see guard.h
  bool chained = false;  // the node has an input "after", see custom_op.cc
  Options options;

  int Inputs() const { return 3 + (chained ? 1 : 0) + (options.masked ? 1 : 0); }
};

// Throws Error that names the attribute, the value and what is expected.
Attributes ParseAttributes(int size, const char** keys, const char** values);

}  // namespace syncbn
