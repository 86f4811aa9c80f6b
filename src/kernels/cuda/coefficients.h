// Computes the coefficients with which a layer predicts on the device, so that the host need not
// wait for the running statistics.
#pragma once
#include <cstdint>

#include "kernels/cuda/batch_norm_cuda.h"

namespace syncbn::cuda {

// All arrays hold `channels` doubles in memory that the device can reach.
struct Coefficients {
  int64_t channels;
  const double *running_mean, *running_var, *beta;
  const double* gamma;  // null for ones
  double epsilon;
  double *mean, *scale, *offset;  // of a ElementwisePass
};

void ComputeCoefficients(const Coefficients& arrays, Stream stream);

}  // namespace syncbn::cuda
