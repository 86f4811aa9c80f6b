// Chooses the element type of the kernels; see batch_norm_cuda.h.
#include "kernels/cuda/batch_norm_cuda.h"

#include "kernels/cuda/batch_norm.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/partition.h"

namespace syncbn::cuda {
namespace {

// The result of use(the kernels for this element type).
template <typename Use>
auto WithKernels(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat64: return use(BatchNorm<double>());
    case DType::kFloat16: return use(BatchNorm<__half>());
    default: return use(BatchNorm<float>());
  }
}

}  // namespace

int64_t WorkspaceBytes() {
  return kWorkspaceZeros + int64_t{kMaxPartials} * Multiprocessors() * kPartialBytes;
}

void LocalMoments(const ReductionPass& pass, void* workspace, Stream stream) {
  WithKernels(pass.dtype, [&](auto kernels) { kernels.LocalMoments(pass, workspace, stream); });
}

void Normalize(const ElementwisePass& pass, Stream stream) {
  WithKernels(pass.dtype, [&](auto kernels) { kernels.Normalize(pass, stream); });
}

void BackwardSums(const ReductionPass& pass, void* workspace, Stream stream) {
  WithKernels(pass.dtype, [&](auto kernels) { kernels.BackwardSums(pass, workspace, stream); });
}

void BackwardApply(const ElementwisePass& pass, Stream stream) {
  WithKernels(pass.dtype, [&](auto kernels) { kernels.BackwardApply(pass, stream); });
}

const char* Architectures() { return SYNCBN_CUDA_ARCHITECTURES; }

}  // namespace syncbn::cuda
