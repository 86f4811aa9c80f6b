// The options of a layer, and whether a node of the layer has a mask.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/device.h"
#include "kernels/passes.h"

namespace syncbn {

// The effect of a batch whose mean or variance is not finite: it updates the running statistics,
// does not update them, or raises an error.
enum class NonFinite { kPropagate, kSkip, kRaise };

struct Options {
  int num_devices = 1;
  double epsilon = 1e-5;  // squared units of x
  double momentum = 0.9;  // weight of the old running value
  int axis = 1;           // axis of the channels; negative from the end
  bool fix_gamma = false;
  bool unbiased_running_var = false;
  NonFinite nonfinite = NonFinite::kPropagate;
  Activation activation;
  bool from_output = false;   // backward reads y instead of x
  bool masked = false;        // only the first rows of x are valid, see ForwardTensors
  double timeout = 0;         // seconds; 0 means default_timeout
  std::set<Device> contexts;  // contexts of the parameters, if known; only for messages
  std::vector<int> ranks;     // synchronized ranks, ascending; empty for all ranks
  std::string shared_name;    // name of the layer in all processes, unique in each process
};

}  // namespace syncbn
