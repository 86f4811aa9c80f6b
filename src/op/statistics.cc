#include "op/statistics.h"

#include <cmath>
#include <cstdio>
#include <mutex>

namespace syncbn {
namespace {

// A zero weight drops its term, so that 0 * inf is 0.
double WeightedSum(double keep, double old, double batch) {
  if (keep == 0) return batch;
  return keep == 1 ? old : keep * old + (1 - keep) * batch;
}

// Returns the variance that updates the running variance. The batch must not be empty. A single
// element has no unbiased variance; its biased variance is 0.
double VarOf(const BatchMoments& batch, size_t c, const Options& options) {
  const bool is_unbiased = options.unbiased_running_var && batch.count > 1;
  return batch.m2[c] / batch.count * (is_unbiased ? batch.count / (batch.count - 1) : 1.0);
}

void WarnOfSingleValue(const std::string& layer) {
  static std::once_flag once;
  std::call_once(once, [&] {
    std::fprintf(stderr,
                 "gluon_syncbn: SyncBatchNorm '%s' must have at least two values per channel over "
                 "all devices, got one. Its output is beta, whatever the input is.\n",
                 layer.c_str());
  });
}

bool CanHold(const Tensor& vector, double value) {
  return std::isfinite(vector.dtype == DType::kFloat64 ? value : static_cast<float>(value));
}

}  // namespace

std::string FirstNonFinite(const BatchMoments& batch, const Options& options,
                           const Tensor& running_mean, const Tensor& running_var) {
  for (size_t c = 0; c < batch.mean.size() && batch.count > 0; ++c) {
    const bool is_finite =
        CanHold(running_mean, batch.mean[c]) && CanHold(running_var, VarOf(batch, c, options));
    if (!is_finite) return std::to_string(c);
  }
  return "";
}

void UpdateRunning(const BatchMoments& batch, const Options& options, const std::string& layer,
                   Backend* backend, const Tensor& running_mean, const Tensor& running_var) {
  if (batch.count == 0) return;
  if (batch.count == 1) WarnOfSingleValue(layer);
  const double keep = options.momentum;
  std::vector<double> mean = backend->Read(running_mean);
  std::vector<double> var = backend->Read(running_var);
  for (size_t c = 0; c < mean.size(); ++c) {
    mean[c] = WeightedSum(keep, mean[c], batch.mean[c]);
    var[c] = WeightedSum(keep, var[c], VarOf(batch, c, options));
  }
  backend->Write(mean, WriteMode::kWrite, running_mean);
  backend->Write(var, WriteMode::kWrite, running_var);
}

void CollectedMoments::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  latest_call_ = -1;
  total_.clear();
  is_active_ = true;
}

void CollectedMoments::Add(int64_t call, const BatchMoments& batch, bool unbiased) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call == latest_call_ || batch.count == 0) return;
  latest_call_ = call;
  is_unbiased_ = unbiased;
  total_.resize(batch.mean.size());
  for (size_t c = 0; c < total_.size(); ++c) {
    total_[c] = Merge(total_[c], {batch.count, batch.mean[c], batch.m2[c]});
  }
}

std::vector<double> CollectedMoments::Numbers() const {
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

}  // namespace syncbn
