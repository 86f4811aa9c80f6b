// Lets a training step change parameters as a whole, or not at all.
// Who uses it: python_api.cc, for native/steps.py, which calls it before and after the update.
#pragma once
#include <memory>
#include <vector>

#include "mxnet/mxnet_api.h"
#include "op/registry.h"

namespace syncbn {

enum Verdict { kUndecided = 0, kWhole = 1, kDropped = 2 };

// Numbers that live in Python, at least until the step is decided.
struct StepNumbers {
  int64_t* errors_seen;  // operators that had failed when the trainer's step before was decided
  int* verdict;
};

struct Step;

// A step whose gradients are queued, and whose update is about to be.
class StepCommit {
 public:
  // Queues operations that decide, once all gradients are computed, whether the step is whole. If
  // one of our operators has failed since the step before, or a gradient carries an error, what
  // reads the gradients is skipped; else the running statistics of `layers` are committed. Each of
  // `groups` of gradients gets a separate error. `token` is any small array, ready once that is
  // decided.
  StepCommit(std::vector<Arrays> groups, Arrays running_statistics, NDArrayHandle token,
             std::vector<std::shared_ptr<Layer>> layers, StepNumbers numbers);

  // Queues operations after the update: a read of these arrays after a dropped step waits until
  // all updates of the array's group are skipped, and gets an error that the updates do not share.
  void Seal(const std::vector<Arrays>& groups);

 private:
  void Push(EngineWork work, Arrays read, Arrays written, EngineProperty property);

  const std::shared_ptr<Step> step_;  // queued operations share it
};

}  // namespace syncbn
