#include "op/statistics.h"

#include <cmath>
#include <cstdio>
#include <vector>

namespace syncbn {
namespace {

// A term whose weight is zero is left out, because 0 * inf is NaN.
double WeightedSum(double keep, double old, double batch) {
  if (keep == 0) return batch;
  return keep == 1 ? old : keep * old + (1 - keep) * batch;
}

// Returns the variance that updates the running variance. The batch must not be empty. The result
// for one element is the biased variance, 0, because the unbiased variance needs two elements.
double VarOf(const BatchMoments& batch, size_t c, const Options& options) {
  const double count = batch.count();
  const bool is_unbiased = options.unbiased_running_var && count > 1;
  return batch.m2(c) / count * (is_unbiased ? count / (count - 1) : 1.0);
}

void WarnOfSingleValue(const std::string& layer) {
  static std::once_flag once;
  std::call_once(once, [&] {
    std::fprintf(stderr,
                 "gluon_syncbn: SyncBatchNorm '%s' trains on one value per channel over all "
                 "devices, so its output does not depend on its input. Use a larger batch.\n",
                 layer.c_str());
  });
}

bool CanHold(const Tensor& vector, double value) {
  return std::isfinite(vector.dtype == DType::kFloat64 ? value : static_cast<float>(value));
}

}  // namespace

std::optional<size_t> FirstNonFinite(const BatchMoments& batch, const Options& options,
                                     const Tensor& running_mean, const Tensor& running_var) {
  for (size_t c = 0; c < batch.channels() && batch.count() > 0; ++c) {
    const bool is_finite =
        CanHold(running_mean, batch.mean(c)) && CanHold(running_var, VarOf(batch, c, options));
    if (!is_finite) return c;
  }
  return {};
}

void UpdateRunning(const BatchMoments& batch, const Options& options, const std::string& layer,
                   Backend* backend, const Tensor& running_mean, const Tensor& running_var) {
  if (batch.count() == 0) return;
  if (batch.count() == 1) WarnOfSingleValue(layer);
  const double keep = options.momentum;
  std::vector<double> mean = backend->Read(running_mean);
  std::vector<double> var = backend->Read(running_var);
  for (size_t c = 0; c < mean.size(); ++c) {
    mean[c] = WeightedSum(keep, mean[c], batch.mean(c));
    var[c] = WeightedSum(keep, var[c], VarOf(batch, c, options));
  }
  backend->Write(mean.data(), WriteMode::kWrite, running_mean);
  backend->Write(var.data(), WriteMode::kWrite, running_var);
}

void CollectedMoments::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  latest_call_ = -1;
  total_.numbers.clear();
  is_active_ = true;
}

void CollectedMoments::Add(int64_t call, const BatchMoments& batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call == latest_call_ || batch.count() == 0) return;
  latest_call_ = call;
  if (total_.numbers.empty()) {
    total_ = batch;
  } else {
    total_.MergeWith(batch);
  }
}

Numbers CollectedMoments::Total() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_.numbers;
}

}  // namespace syncbn
