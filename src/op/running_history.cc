// One step of each device. Values are compared by their bits, because NaN differs from itself.
#include "op/running_history.h"

#include <cstring>
#include <utility>

namespace syncbn {
namespace {

std::mutex histories_mutex;
std::map<std::string, std::shared_ptr<RunningHistory>>& Histories() {
  static auto* histories = new std::map<std::string, std::shared_ptr<RunningHistory>>;
  return *histories;  // operators may outlive static destructors
}

bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

bool SameBits(const Statistics& a, const Statistics& b) {
  return SameBits(a.mean, b.mean) && SameBits(a.var, b.var);
}

}  // namespace

std::shared_ptr<RunningHistory> RunningHistory::Of(const std::string& key) {
  std::lock_guard<std::mutex> lock(histories_mutex);
  std::shared_ptr<RunningHistory>& history = Histories()[key];
  if (!history) history = std::make_shared<RunningHistory>();
  return history;
}

void RunningHistory::Release(const std::string& key) {
  std::lock_guard<std::mutex> lock(histories_mutex);
  auto& histories = Histories();
  histories.erase(key);
  const std::string part = key + '/';
  for (auto entry = histories.lower_bound(part);
       entry != histories.end() && entry->first.compare(0, part.size(), part) == 0;) {
    entry = histories.erase(entry);
  }
}

int64_t RunningHistory::Batches() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return batches_;
}

void RunningHistory::SetBatches(int64_t batches) {
  std::lock_guard<std::mutex> lock(mutex_);
  batches_ = batches_before_step_ = batches;
}

int64_t RunningHistory::CountBatch(int64_t call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call != latest_call_) ++batches_;
  latest_call_ = call;
  return batches_ - 1;
}

void RunningHistory::Note(const Device& device, Statistics before, Statistics after) {
  std::lock_guard<std::mutex> lock(mutex_);
  Step& step = steps_[device];
  // Other statistics may have been loaded or copied since the latest update.
  if (!step.is_open || !SameBits(step.latest, before)) {
    step.before = std::move(before);
    step.is_open = true;
  }
  step.latest = std::move(after);
}

void RunningHistory::Commit() {
  std::lock_guard<std::mutex> lock(mutex_);
  batches_before_step_ = batches_;
  for (auto& entry : steps_) entry.second.is_open = false;
}

bool RunningHistory::IsOpen() const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : steps_) {
    if (entry.second.is_open) return true;
  }
  return false;
}

bool RunningHistory::Undo(const Device& device, Statistics* statistics) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto undo = [&](const Step& step) {
    if (!step.is_open || !SameBits(step.latest, *statistics)) return false;
    *statistics = step.before;
    return true;
  };
  const auto own = steps_.find(device);
  if (own != steps_.end() && undo(own->second)) return true;
  // A device without rows in the step gets the statistics of one that has (participating).
  for (const auto& entry : steps_) {
    if (undo(entry.second)) return true;
  }
  return false;
}

void RunningHistory::EndUndone() {
  std::lock_guard<std::mutex> lock(mutex_);
  batches_ = batches_before_step_;
  for (auto& entry : steps_) entry.second.is_open = false;
}

}  // namespace syncbn
