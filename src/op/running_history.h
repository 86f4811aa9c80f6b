// The past of a group's running statistics: their values before the current step, so that a failed
// step can be undone.
// Who uses it: SyncBatchNorm notes its updates; mxnet/commit.cc ends a step that is whole; Python's
// recover() undoes one that is not. It must not know where statistics are stored.
#pragma once
#include <map>
#include <mutex>
#include <vector>

#include "collective/devices/device.h"
#include "op/collected_moments.h"

namespace syncbn {

struct Statistics {
  std::vector<double> mean, var;
};

class RunningHistory {
 public:
  // Notes an update on `device` from `before` to `after`, both as stored in the statistics' dtype.
  void Note(const Device& device, Statistics before, Statistics after);
  // Ends the step: its updates are final, or were undone.
  void EndStep();

  // True if statistics were updated since the latest EndStep.
  bool IsOpen() const;
  // Replaces statistics that an update since the latest EndStep has left by those before the step.
  // False for any other statistics: those before the step, or those written since by other code.
  bool Undo(const Device& device, Statistics* statistics) const;

  CollectedMoments& collected() { return collected_; }

 private:
  struct Step {
    Statistics before;          // the step
    Statistics former, latest;  // before and after its latest update
  };

  // The step, the device's own if possible, that has left these statistics; null if none has. A
  // device without rows gets those of one that has (participating), which may be a call ahead.
  const Step* StepThatLeft(const Device& device, const Statistics& statistics) const;

  mutable std::mutex mutex_;
  std::map<Device, Step> steps_;  // since the latest EndStep
  CollectedMoments collected_;
};

}  // namespace syncbn
