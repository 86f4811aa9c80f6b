// Chooses the element type of the kernels; see batch_norm_cuda.h.
#include "kernels/cuda/batch_norm_cuda.h"

#include "kernels/cuda/batch_norm.h"

namespace syncbn::cuda {
namespace {

// use(a null pointer to the element type)
template <typename Use>
auto WithType(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat64: return use(static_cast<double*>(nullptr));
    case DType::kFloat16: return use(static_cast<__half*>(nullptr));
    case DType::kBfloat16: return use(static_cast<Bfloat16*>(nullptr));
    default: return use(static_cast<float*>(nullptr));
  }
}

template <typename T>
BatchNorm<T> Kernels(T* /*type*/) {
  return {};
}

}  // namespace

int64_t WorkspaceBytes(DType dtype, const Layout& layout) {
  return WithType(dtype, [&](auto* type) { return Kernels(type).WorkspaceBytes(layout); });
}

void LocalMoments(const MomentsPass& pass, void* workspace, Stream stream) {
  WithType(pass.dtype, [&](auto* type) { Kernels(type).LocalMoments(pass, workspace, stream); });
}

void Normalize(const NormalizePass& pass, Stream stream) {
  WithType(pass.dtype, [&](auto* type) { Kernels(type).Normalize(pass, stream); });
}

void BackwardSums(const SumsPass& pass, void* workspace, Stream stream) {
  WithType(pass.dtype, [&](auto* type) { Kernels(type).BackwardSums(pass, workspace, stream); });
}

void BackwardApply(const ApplyPass& pass, Stream stream) {
  WithType(pass.dtype, [&](auto* type) { Kernels(type).BackwardApply(pass, stream); });
}

const char* Architectures() { return SYNCBN_CUDA_ARCHITECTURES; }

}  // namespace syncbn::cuda
