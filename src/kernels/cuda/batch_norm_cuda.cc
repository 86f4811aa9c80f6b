// Chooses the element type of the kernels; see batch_norm_cuda.h.
#include "kernels/cuda/batch_norm_cuda.h"

#include "kernels/cuda/batch_norm.h"

namespace syncbn {
namespace cuda {
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
const T* In(const void* tensor, T* /*type*/) {
  return static_cast<const T*>(tensor);
}
template <typename T>
BatchNorm<T> Kernels(T* /*type*/) {
  return {};
}

}  // namespace

int64_t WorkspaceBytes(DType dtype, const Layout& layout) {
  return WithType(dtype, [&](auto* type) { return Kernels(type).WorkspaceBytes(layout); });
}

void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace, double* mean,
                  double* m2, Stream stream) {
  WithType(dtype, [&](auto* type) {
    Kernels(type).LocalMoments(In(x, type), layout, workspace, mean, m2, stream);
  });
}

void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
               const double* scale, const double* offset, const Activation& activation,
               Write write, void* y, Stream stream) {
  WithType(dtype, [&](auto* type) {
    Kernels(type).Normalize(In(x, type), layout, mean, scale, offset, activation, write,
                            static_cast<decltype(type)>(y), stream);
  });
}

void BackwardSums(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u, Stream stream) {
  WithType(dtype, [&](auto* type) {
    Kernels(type).BackwardSums(In(t, type), In(dy, type), layout, recovery, mean, workspace,
                               sum_dz, sum_dz_u, stream);
  });
}

void BackwardApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                   const Recovery& recovery, const double* mean, const double* a,
                   const double* b, const double* d, Write write, void* dx, Stream stream) {
  WithType(dtype, [&](auto* type) {
    Kernels(type).BackwardApply(In(t, type), In(dy, type), layout, recovery, mean, a, b, d, write,
                                static_cast<decltype(type)>(dx), stream);
  });
}

const char* Architectures() { return SYNCBN_CUDA_ARCHITECTURES; }

}  // namespace cuda
}  // namespace syncbn
