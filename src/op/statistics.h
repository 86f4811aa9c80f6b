// The statistics of batches: how they update the running statistics, or how a layer collects them.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/moments.h"
#include "op/backend.h"
#include "op/options.h"

namespace syncbn {

// Per-channel moments of a shard or of the whole batch.
struct BatchMoments {
  double count;  // elements per channel
  std::vector<double> mean, m2;
};

// Returns the number of the first channel whose mean or variance is not finite in the dtype of the
// running statistics, as text, or an empty text if there is none.
std::string FirstNonFinite(const BatchMoments& batch, const Options& options,
                           const Tensor& running_mean, const Tensor& running_var);

// Sets running = momentum * running + (1 - momentum) * batch for the mean and the variance, which
// is unbiased if the options say so. An empty batch changes nothing. The first batch with one value
// per channel prints a warning that names the layer.
void UpdateRunning(const BatchMoments& batch, const Options& options, const std::string& layer,
                   Backend* backend, const Tensor& running_mean, const Tensor& running_var);

// The merged moments of all batches that a layer has normalized while it collected them. A
// collecting layer uses each batch's statistics, also in inference, and does not update its running
// statistics.
class CollectedMoments {
 public:
  // Indices of Numbers(): two numbers, then each channel's mean, then each channel's m2.
  enum { kCount, kUnbiased, kMean };

  void Start();
  void End() { is_active_ = false; }
  bool IsActive() const { return is_active_; }

  // Adds the batch of a forward call once, although each device of the layer has its moments. The
  // devices meet in each call, so no device adds the next batch before all have added this one.
  void Add(int64_t call, const BatchMoments& batch, bool unbiased);

  // Returns an empty vector if there was no batch.
  std::vector<double> Numbers() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_active_{false};
  int64_t latest_call_ = -1;
  bool is_unbiased_ = false;
  std::vector<Moments> total_;
};

}  // namespace syncbn
