// The moments of all batches that a group of devices has normalized while it collected them. While
// they are collected a layer takes each batch's statistics, also in inference, and leaves its
// running statistics alone.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/moments.h"

namespace syncbn {

class CollectedMoments {
 public:
  // All as double, for the C interface: two numbers, each channel's mean, and each channel's m2.
  enum { kCount, kUnbiased, kMean };

  void Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    latest_call_ = -1;
    total_.clear();
    is_active_ = true;
  }
  void End() { is_active_ = false; }
  bool IsActive() const { return is_active_; }

  // Adds the batch of a forward call, which each device of the group has the same moments of. They
  // meet in each call, so none adds the next one before all have added this one.
  void Add(int64_t call, double count, const std::vector<double>& mean,
           const std::vector<double>& m2, bool unbiased) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (call == latest_call_ || count == 0) return;
    latest_call_ = call;
    is_unbiased_ = unbiased;
    total_.resize(mean.size());
    for (size_t c = 0; c < mean.size(); ++c) {
      total_[c] = Merge(total_[c], {count, mean[c], m2[c]});
    }
  }

  // Empty if there was no batch.
  std::vector<double> Numbers() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (total_.empty()) return {};
    const size_t channels = total_.size();
    std::vector<double> numbers(kMean + 2 * channels);
    numbers[kCount] = total_[0].count;
    numbers[kUnbiased] = is_unbiased_;
    for (size_t c = 0; c < channels; ++c) {
      numbers[kMean + c] = total_[c].mean;
      numbers[kMean + channels + c] = total_[c].m2;
    }
    return numbers;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_active_{false};
  int64_t latest_call_ = -1;
  bool is_unbiased_ = false;
  std::vector<Moments> total_;
};

}  // namespace syncbn
