// Copies several vectors, or adds them to their destinations, in one launch.
#include <algorithm>

#include "core/error.h"
#include "core/tensor.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"

namespace syncbn::cuda {
namespace {

constexpr int kThreads = 256;

struct Copies {
  VectorCopy each[kMaxVectors];
};

__device__ double ReadElement(const void* vector, bool is_double, int64_t i) {
  if (is_double) return static_cast<const double*>(vector)[i];
  return static_cast<const float*>(vector)[i];
}

__global__ void CopyKernel(Copies copies, unsigned blocks_each) {
  const VectorCopy copy = copies.each[blockIdx.x / blocks_each];
  const int64_t i = static_cast<int64_t>(blockIdx.x % blocks_each) * kThreads + threadIdx.x;
  if (i >= copy.size) return;
  double value = ReadElement(copy.from, copy.from_double, i);
  if (copy.add) value += ReadElement(copy.to, copy.to_double, i);
  if (copy.to_double) {
    static_cast<double*>(copy.to)[i] = value;
  } else {
    static_cast<float*>(copy.to)[i] = static_cast<float>(value);
  }
}

}  // namespace

void CopyVectors(const std::vector<VectorCopy>& copies, cudaStream_t stream) {
  int64_t longest = 0;
  for (const VectorCopy& copy : copies) longest = std::max(longest, copy.size);
  if (longest == 0) return;
  if (copies.size() > kMaxVectors) {
    throw DeviceError(Concat("CopyVectors: there must be at most ", kMaxVectors, " vectors, got ",
                             copies.size()));
  }
  Copies all = {};
  std::copy(copies.begin(), copies.end(), all.each);
  const int64_t blocks_each = CeilDiv(longest, kThreads);
  Launch<CopyKernel>("CopyVectors", blocks_each * static_cast<int64_t>(copies.size()), kThreads,
                     stream, all, static_cast<unsigned>(blocks_each));
}

}  // namespace syncbn::cuda
