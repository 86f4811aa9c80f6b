// The C functions declared in c_api_cuda.h: they check the dtype and forward to the kernels.
// Who uses it: tests and benchmarks, through ctypes.
#pragma GCC visibility push(default)
#include "kernels/c_api_cuda.h"
#pragma GCC visibility pop

#include "core/error.h"
#include "core/last_error.h"
#include "kernels/cuda/batch_norm_cuda.h"

namespace cuda = syncbn::cuda;
using syncbn::CatchAll;
using syncbn::DType;
using syncbn::Layout;

namespace {

DType ToDType(int dtype) {
  if (!syncbn::IsSupported(dtype)) {
    throw syncbn::Error(syncbn::Concat("no kernels for dtype number ", dtype));
  }
  return static_cast<DType>(dtype);
}

cuda::Write WriteMode(int add) { return add != 0 ? cuda::Write::kAdd : cuda::Write::kAssign; }

syncbn::Activation ToActivation(int function, double slope) {
  return {static_cast<syncbn::Function>(function), slope};
}

cuda::Stream ToStream(void* stream) { return static_cast<cuda::Stream>(stream); }

}  // namespace

int64_t gluon_syncbn_cuda_workspace_bytes(int dtype, int64_t outer, int64_t channels,
                                          int64_t inner) {
  int64_t bytes = -1;
  CatchAll([&] { bytes = cuda::WorkspaceBytes(ToDType(dtype), Layout{outer, channels, inner}); });
  return bytes;
}

int64_t gluon_syncbn_cuda_workspace_zeros() { return cuda::kWorkspaceZeros; }

int gluon_syncbn_cuda_local_moments(int dtype, const void* x, int64_t outer, int64_t channels,
                                    int64_t inner, void* workspace, double* mean, double* m2,
                                    void* stream) {
  return CatchAll([&] {
    cuda::LocalMoments(ToDType(dtype), x, Layout{outer, channels, inner}, workspace, mean, m2,
                       ToStream(stream));
  });
}

int gluon_syncbn_cuda_normalize(int dtype, const void* x, int64_t outer, int64_t channels,
                                int64_t inner, const double* mean, const double* scale,
                                const double* offset, int function, double slope, int add, void* y,
                                void* stream) {
  return CatchAll([&] {
    cuda::Normalize(ToDType(dtype), x, Layout{outer, channels, inner}, mean, scale, offset,
                    ToActivation(function, slope), WriteMode(add), y, ToStream(stream));
  });
}

int gluon_syncbn_cuda_backward_sums(int dtype, const void* t, const void* dy, int64_t outer,
                                    int64_t channels, int64_t inner, int function, double slope,
                                    int from_output, const double* scale, const double* offset,
                                    const double* mean, void* workspace, double* sum_dz,
                                    double* sum_dz_u, void* stream) {
  return CatchAll([&] {
    cuda::BackwardSums(ToDType(dtype), t, dy, Layout{outer, channels, inner},
                       {ToActivation(function, slope), from_output != 0, scale, offset}, mean,
                       workspace, sum_dz, sum_dz_u, ToStream(stream));
  });
}

int gluon_syncbn_cuda_backward_apply(int dtype, const void* t, const void* dy, int64_t outer,
                                     int64_t channels, int64_t inner, int function, double slope,
                                     int from_output, const double* scale, const double* offset,
                                     const double* mean, const double* a, const double* b,
                                     const double* d, int add, void* dx, void* stream) {
  return CatchAll([&] {
    cuda::BackwardApply(ToDType(dtype), t, dy, Layout{outer, channels, inner},
                        {ToActivation(function, slope), from_output != 0, scale, offset}, mean, a,
                        b, d, WriteMode(add), dx, ToStream(stream));
  });
}
