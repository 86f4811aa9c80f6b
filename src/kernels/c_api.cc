// The C functions declared in c_api.h: they check the dtype and forward to the kernels.
// Who uses it: tests, through ctypes.
#pragma GCC visibility push(default)
#include "kernels/c_api.h"
#pragma GCC visibility pop

#include "core/error.h"
#include "core/last_error.h"
#include "kernels/cpu/batch_norm_cpu.h"

namespace cpu = syncbn::cpu;
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

cpu::Write WriteMode(int add) { return add != 0 ? cpu::Write::kAdd : cpu::Write::kAssign; }

syncbn::Activation ToActivation(int function, double slope) {
  return {static_cast<syncbn::Function>(function), slope};
}

}  // namespace

int64_t gluon_syncbn_cpu_workspace_bytes(int64_t outer, int64_t channels, int64_t inner) {
  return CatchAll(int64_t{-1},
                  [&] { return cpu::WorkspaceBytes(Layout{outer, channels, inner}); });
}

int gluon_syncbn_cpu_local_moments(int dtype, const void* x, int64_t outer, int64_t channels,
                                   int64_t inner, void* workspace, double* mean, double* m2) {
  return CatchAll([&] {
    cpu::LocalMoments(ToDType(dtype), x, Layout{outer, channels, inner}, workspace, mean, m2);
  });
}

int gluon_syncbn_cpu_normalize(int dtype, const void* x, int64_t outer, int64_t channels,
                               int64_t inner, const double* mean, const double* scale,
                               const double* offset, int function, double slope, int add, void* y) {
  return CatchAll([&] {
    cpu::Normalize(ToDType(dtype), x, Layout{outer, channels, inner}, mean, scale, offset,
                   ToActivation(function, slope), WriteMode(add), y);
  });
}

int gluon_syncbn_cpu_backward_sums(int dtype, const void* t, const void* dy, int64_t outer,
                                   int64_t channels, int64_t inner, int function, double slope,
                                   int from_output, const double* scale, const double* offset,
                                   const double* mean, void* workspace, double* sum_dz,
                                   double* sum_dz_u) {
  return CatchAll([&] {
    cpu::BackwardSums(ToDType(dtype), t, dy, Layout{outer, channels, inner},
                      {ToActivation(function, slope), from_output != 0, scale, offset}, mean,
                      workspace, sum_dz, sum_dz_u);
  });
}

int gluon_syncbn_cpu_backward_apply(int dtype, const void* t, const void* dy, int64_t outer,
                                    int64_t channels, int64_t inner, int function, double slope,
                                    int from_output, const double* scale, const double* offset,
                                    const double* mean, const double* a, const double* b,
                                    const double* d, int add, void* dx) {
  return CatchAll([&] {
    cpu::BackwardApply(ToDType(dtype), t, dy, Layout{outer, channels, inner},
                       {ToActivation(function, slope), from_output != 0, scale, offset}, mean, a, b,
                       d, WriteMode(add), dx);
  });
}
