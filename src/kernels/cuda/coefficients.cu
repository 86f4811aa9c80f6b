// One thread for each channel.
#include "kernels/cuda/coefficients.h"

#include "core/layout.h"
#include "core/moments.h"
#include "kernels/cuda/launch.h"

namespace syncbn::cuda {
namespace {

constexpr int kChannelThreads = 256;

__global__ void CoefficientsKernel(Coefficients of) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kChannelThreads + threadIdx.x;
  if (c >= of.channels) return;
  const double gamma = of.gamma == nullptr ? 1.0 : of.gamma[c];
  of.mean[c] = of.running_mean[c];
  of.scale[c] = gamma * InvStd(of.running_var[c], of.epsilon);
  of.offset[c] = of.beta[c];
}

}  // namespace

void ComputeCoefficients(const Coefficients& of, Stream stream) {
  if (of.channels == 0) return;
  Launch<CoefficientsKernel>("ComputeCoefficients", CeilDiv(of.channels, kChannelThreads),
                             kChannelThreads, stream, of);
}

}  // namespace syncbn::cuda
