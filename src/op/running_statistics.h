// The running mean and variance of a layer.
#pragma once
#include <string>
#include <vector>

#include "op/backend.h"
#include "op/options.h"

namespace syncbn {

// Of each channel, in a shard or in the whole batch.
struct BatchMoments {
  double count;  // elements per channel
  std::vector<double> mean, m2;
};

// The number of the first channel whose mean or variance of the batch is not finite in the dtype of
// the running one, as text; empty if there is none.
std::string FirstNonFinite(const BatchMoments& batch, const Options& options,
                           const Tensor& running_mean, const Tensor& running_var);

// running = momentum * running + (1 - momentum) * batch's, for the mean and the (on request
// unbiased) variance. Nothing where the batch is empty. `layer` is for a warning, once,
// of a batch with one value per channel.
void UpdateRunning(const BatchMoments& batch, const Options& options, const std::string& layer,
                   Backend* backend, const Tensor& running_mean, const Tensor& running_var);

}  // namespace syncbn
