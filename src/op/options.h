// The options of a layer.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/device.h"
#include "kernels/passes.h"

namespace syncbn {

// The effect of a batch whose mean or variance is not finite: it updates the running statistics,
// does not update them, or raises an error.
enum class NonFinite : int { kPropagate, kSkip, kRaise };

// LayerOptions in gluon_syncbn/native/library.py is this struct for Python, which has checked the
// values. Both have the same fields in the same order.
struct LayerOptions {
  Activation activation = {};
  double epsilon = 1e-5;  // squared units of x
  double momentum = 0.9;  // weight of the old running value
  double timeout = 0;     // seconds; 0 means default_timeout
  int num_devices = 1;
  int axis = 1;       // axis of the channels; negative from the end
  int fix_gamma = 0;  // 1 if gamma is 1
  int unbiased_running_var = 0;
  NonFinite nonfinite = NonFinite::kPropagate;
  int from_output = 0;  // 1 if backward reads y instead of x
};

// The options of a call. Operators share them and do not change them.
struct Options : LayerOptions {
  std::set<Device> contexts{};  // contexts of the parameters, if known; only for texts of errors
  std::vector<int> ranks{};     // synchronized ranks, ascending; empty for all ranks
  std::string shared_name{};    // identifies the layer in messages between processes
};

}  // namespace syncbn
