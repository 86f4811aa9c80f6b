// One thread for each channel.
#include "kernels/cuda/coefficients.h"

#include "core/layout.h"
#include "core/moments.h"
#include "kernels/cuda/launch.h"

namespace syncbn::cuda {
namespace {

constexpr int kChannelThreads = 256;

__global__ void CoefficientsKernel(Coefficients arrays) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kChannelThreads + threadIdx.x;
  if (c >= arrays.channels) return;
  const double gamma = arrays.gamma == nullptr ? 1.0 : arrays.gamma[c];
  arrays.mean[c] = arrays.running_mean[c];
  arrays.scale[c] = gamma * InvStd(arrays.running_var[c], arrays.epsilon);
  arrays.offset[c] = arrays.beta[c];
}

}  // namespace

void ComputeCoefficients(const Coefficients& arrays, Stream stream) {
  if (arrays.channels == 0) return;
  Launch<CoefficientsKernel>("ComputeCoefficients", CeilDiv(arrays.channels, kChannelThreads),
                             kChannelThreads, stream, arrays);
}

}  // namespace syncbn::cuda
