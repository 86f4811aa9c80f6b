// The options of a layer, and whether one of its nodes has a mask.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/device.h"
#include "kernels/passes.h"

namespace syncbn {

// A batch with a mean or variance that is not finite: does it update the running statistics, not
// update them, or end with an error?
enum class NonFinite { kPropagate, kSkip, kRaise };

struct Options {
  int num_devices = 1;
  double epsilon = 1e-5;  // in squared units of x
  double momentum = 0.9;  // fraction of the old running value that is kept
  int axis = 1;           // one of x's; negative from the end
  bool fix_gamma = false;
  bool unbiased_running_var = false;
  NonFinite nonfinite = NonFinite::kPropagate;
  Activation activation;     // of the output
  bool from_output = false;  // backward reads y instead of x
  bool masked = false;       // only the first rows of x are valid, see ForwardTensors
  double timeout = 0;  // seconds; 0 means default_timeout
  std::set<Device> contexts;  // of the layer's parameters, if known; for messages
  std::vector<int> ranks;        // that synchronize, ascending; empty for all ranks
  std::string shared_name;       // of the layer, equal in all processes and unique in each
};

}  // namespace syncbn
