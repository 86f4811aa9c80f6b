// Lets a training step change parameters as a whole, or not at all.
// Who uses it: python_api.cc, for native/steps.py, which calls it between gradients and update.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "mxnet/mxnet_api.h"
#include "op/running_history.h"

namespace syncbn {

enum Verdict { kUndecided = 0, kWhole = 1, kDropped = 2 };

struct StepArrays {
  std::vector<std::vector<NDArrayHandle>> gradients;  // for each parameter those of all devices
  std::vector<NDArrayHandle> running_statistics;
  NDArrayHandle token;  // any small array of the caller's own, ready once the step is decided
};

// Queues operations that decide, once all gradients are computed, whether the step is whole. If a
// layer has failed, or a gradient carries an error, updates that read the gradients are skipped;
// else the histories of `layers` are committed. `verdict` has to live until it is set.
void CommitStep(const StepArrays& arrays, std::vector<std::shared_ptr<RunningHistory>> layers,
                int* verdict);

}  // namespace syncbn
