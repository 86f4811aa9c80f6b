// The running statistics of a layer, and the moments that it collects for recompute_statistics.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "core/moments.h"
#include "core/tensor.h"
#include "op/backend.h"
#include "op/options.h"

namespace syncbn {

// Returns the first channel whose mean or variance is not finite in the running statistics' dtype.
std::optional<size_t> FirstNonFinite(const BatchMoments& batch, const Options& options,
                                     const Tensor& running_mean, const Tensor& running_var);

// Sets running = momentum * running + (1 - momentum) * batch for the mean and the variance. An
// empty batch changes nothing. Prints a warning, once per process, if each channel has one value.
void UpdateRunning(const BatchMoments& batch, const Options& options, const std::string& layer,
                   Backend* backend, const Tensor& running_mean, const Tensor& running_var);

// The merged moments of batches that a layer receives while it collects. Meanwhile the layer uses
// the statistics of each batch, also in inference, and does not change its running statistics.
class CollectedMoments {
 public:
  void Start();
  void End() { is_active_ = false; }
  bool IsActive() const { return is_active_; }

  // Adds the batch of the forward call with number `call`. All devices add the same batch, and only
  // the first Add counts. Devices wait for each other, so `call` never decreases.
  void Add(int64_t call, const BatchMoments& batch);

  // Returns (count, mean[C], m2[C]); empty without a batch.
  Numbers Total() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_active_{false};
  int64_t latest_call_ = -1;
  BatchMoments total_;
};

}  // namespace syncbn
