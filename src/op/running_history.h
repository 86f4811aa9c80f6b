// The past of a group's running statistics: how many training batches they have seen, and their
// values before the current step, so that a failed step can be undone.
// Who uses it: SyncBatchNorm notes its updates; mxnet/commit.cc ends a step that is whole; Python's
// recover() undoes one that is not. It must not know where statistics are stored.
#pragma once
#include <cstdint>
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
  // Training batches so far.
  int64_t Batches() const;
  void SetBatches(int64_t batches);
  // Training batches before this forward call, which counts from now on. All devices
  // update for one call before any does for the next, because they meet in each.
  int64_t CountBatch(int64_t call);

  // Notes an update on `device` from `before` to `after`, both as stored in the statistics' dtype.
  void Note(const Device& device, Statistics before, Statistics after);
  // The step is whole: its updates are final.
  void Commit();

  // True if statistics were updated since the latest Commit.
  bool IsOpen() const;
  // Replaces statistics that an update since the latest Commit has left by those before the step.
  // False for any other statistics: those before the step, or those written since by other code.
  bool Undo(const Device& device, Statistics* statistics) const;
  // Ends the step, after its statistics were undone: its batches do not count.
  void EndUndone();

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
  int64_t batches_ = 0;
  int64_t batches_before_step_ = 0;
  int64_t latest_call_ = -1;  // the number of the call that was counted last
  std::map<Device, Step> steps_;  // since the latest Commit or EndUndone
  CollectedMoments collected_;
};

}  // namespace syncbn
