// One step of each device. Values are compared by their bits, because NaN differs from itself.
#include "op/running_history.h"

#include <cstring>
#include <utility>

namespace syncbn {
namespace {

bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

bool SameBits(const Statistics& a, const Statistics& b) {
  return SameBits(a.mean, b.mean) && SameBits(a.var, b.var);
}

}  // namespace

const RunningHistory::Step* RunningHistory::StepThatLeft(const Device& device,
                                                         const Statistics& statistics) const {
  const auto left = [&](const Step& step) {
    return SameBits(step.latest, statistics) || SameBits(step.former, statistics);
  };
  const auto own = steps_.find(device);
  if (own != steps_.end() && left(own->second)) return &own->second;
  for (const auto& entry : steps_) {
    if (left(entry.second)) return &entry.second;
  }
  return nullptr;
}

void RunningHistory::Note(const Device& device, Statistics before, Statistics after) {
  std::lock_guard<std::mutex> lock(mutex_);
  // If no step has left them, they were loaded, or are those of the latest whole step.
  const Step* const step = StepThatLeft(device, before);
  Statistics first = step == nullptr ? before : step->before;
  steps_[device] = {std::move(first), std::move(before), std::move(after)};
}

void RunningHistory::EndStep() {
  std::lock_guard<std::mutex> lock(mutex_);
  steps_.clear();
}

bool RunningHistory::IsOpen() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !steps_.empty();
}

bool RunningHistory::Undo(const Device& device, Statistics* statistics) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Step* const step = StepThatLeft(device, *statistics);
  if (step == nullptr) return false;
  *statistics = step->before;
  return true;
}

}  // namespace syncbn
