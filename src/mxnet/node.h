// A node `Custom(op_type="gluon_syncbn")` of a graph: a layer of this process, and two flags.
#pragma once
#include <memory>
#include <string>

#include "op/registry.h"

namespace syncbn {

struct Node {
  std::shared_ptr<Layer> layer;
  bool masked = false;   // the node has an input "rows", see ForwardTensors
  bool chained = false;  // the node has an input "after", see custom_op.cc

  int Inputs() const { return 3 + (chained ? 1 : 0) + (masked ? 1 : 0); }

  // The layer's options for this node.
  Options GetOptions() const {
    Options options = *layer->options();
    options.masked = masked;
    if (masked) options.axis = -1;
    return options;
  }
};

// Throws Error if this process has no layer of the key in "layer_key".
Node ReadNode(int size, const char** keys, const char** values);

}  // namespace syncbn
