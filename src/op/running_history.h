// The running statistics of a layer before the step under way, so that a failed step can be undone.
// Who uses it: SyncBatchNorm notes its updates; mxnet/commit.cc ends a step that is whole; Python's
// recover() undoes one that is not. It must not know where statistics are stored.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/group.h"

namespace syncbn {

struct Statistics {
  std::vector<double> mean, var;
};

class RunningHistory {
 public:
  // The history of the layer with this key, created at the first call.
  static std::shared_ptr<RunningHistory> Of(const std::string& key);
  static void Release(const std::string& key);

  // Notes an update on `device` from `before` to `after`, both as stored in the dtype of the running
  // statistics. `batches` is the group's number of training batches before it.
  void Note(const Device& device, std::shared_ptr<Group> group, int64_t batches, Statistics before,
            Statistics after);
  // The step is whole: its updates are final.
  void Commit();

  // True if there are updates since the latest Commit.
  bool IsOpen() const;
  // Replaces statistics that an update since the latest Commit has left by those before the step.
  // False if they are others: those from before the step, or written by somebody else since.
  bool Undo(const Device& device, Statistics* statistics) const;
  // Sets the groups' numbers of batches back to those before the step, and commits.
  void UndoBatches();

 private:
  struct Step {
    std::shared_ptr<Group> group;
    int64_t batches = 0;        // before the step
    Statistics before, latest;  // the step, its latest update
    bool is_open = false;
  };

  mutable std::mutex mutex_;
  std::map<Device, Step> steps_;
};

}  // namespace syncbn
