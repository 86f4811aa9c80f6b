// The kernels' host side for one element type; one file each compiles it, to build in parallel.
// Who uses it: batch_norm_cuda.cc chooses the type, batch_norm_<type>.cu define it.
#pragma once
#include "kernels/cuda/batch_norm_cuda.h"

struct __half;

namespace syncbn {
namespace cuda {

struct Bfloat16;

template <typename T>
struct BatchNorm {
  static int64_t WorkspaceBytes(const Layout& layout);
  static void LocalMoments(const T* x, const Layout& layout, void* workspace, double* mean,
                           double* m2, Stream stream);
  static void Normalize(const T* x, const Layout& layout, const double* mean, const double* scale,
                        const double* offset, const Activation& activation, Write write, T* y,
                        Stream stream);
  static void BackwardSums(const T* t, const T* dy, const Layout& layout, const Recovery& recovery,
                           const double* mean, void* workspace, double* sum_dz, double* sum_dz_u,
                           Stream stream);
  static void BackwardApply(const T* t, const T* dy, const Layout& layout, const Recovery& recovery,
                            const double* mean, const double* a, const double* b, const double* d,
                            Write write, T* dx, Stream stream);
};

}  // namespace cuda
}  // namespace syncbn
