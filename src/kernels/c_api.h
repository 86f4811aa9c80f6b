// The kernels as plain C functions, so that tests drive them from NumPy without MXNet.
// `dtype` is a DType number, `add` is 0 (assign) or 1; `function` is a Function number, and with it
// stand the members of Activation and Recovery (core/activation.h). Return 0, or -1 for an unknown
// dtype.
#pragma once
#include <cstdint>

extern "C" {
int64_t gluon_syncbn_cpu_workspace_bytes(int64_t outer, int64_t channels, int64_t inner);
int gluon_syncbn_cpu_local_moments(int dtype, const void* x, int64_t outer, int64_t channels,
                                   int64_t inner, void* workspace, double* mean, double* m2);
int gluon_syncbn_cpu_normalize(int dtype, const void* x, int64_t outer, int64_t channels,
                               int64_t inner, const double* mean, const double* scale,
                               const double* offset, int function, double slope, int add, void* y);
int gluon_syncbn_cpu_backward_sums(int dtype, const void* t, const void* dy, int64_t outer,
                                   int64_t channels, int64_t inner, int function, double slope,
                                   int from_output, const double* scale, const double* offset,
                                   const double* mean, void* workspace, double* sum_dz,
                                   double* sum_dz_u);
int gluon_syncbn_cpu_backward_apply(int dtype, const void* t, const void* dy, int64_t outer,
                                    int64_t channels, int64_t inner, int function, double slope,
                                    int from_output, const double* scale, const double* offset,
                                    const double* mean, const double* a, const double* b,
                                    const double* d, int add, void* dx);
}
