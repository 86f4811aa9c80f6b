// The CUDA kernels as plain C functions, so that tests and benchmarks drive them from any CUDA array
// without MXNet. Pointers are device pointers of the current device; `stream` is a cudaStream_t.
// `dtype` is a DType number, `add` is 0 (assign) or 1; `function` is a Function number, and with it
// stand the members of Activation and Recovery (core/activation.h). Return 0, or -1 with the text
// in gluon_syncbn_last_error.
#pragma once
#include <cstdint>

extern "C" {
// Bytes, of which the first `gluon_syncbn_cuda_workspace_zeros` are to be zero at first; -1 on error.
int64_t gluon_syncbn_cuda_workspace_bytes(int dtype, int64_t outer, int64_t channels,
                                          int64_t inner);
int64_t gluon_syncbn_cuda_workspace_zeros();
int gluon_syncbn_cuda_local_moments(int dtype, const void* x, int64_t outer, int64_t channels,
                                    int64_t inner, void* workspace, double* mean, double* m2,
                                    void* stream);
int gluon_syncbn_cuda_normalize(int dtype, const void* x, int64_t outer, int64_t channels,
                                int64_t inner, const double* mean, const double* scale,
                                const double* offset, int function, double slope, int add, void* y,
                                void* stream);
int gluon_syncbn_cuda_backward_sums(int dtype, const void* t, const void* dy, int64_t outer,
                                    int64_t channels, int64_t inner, int function, double slope,
                                    int from_output, const double* scale, const double* offset,
                                    const double* mean, void* workspace, double* sum_dz,
                                    double* sum_dz_u, void* stream);
int gluon_syncbn_cuda_backward_apply(int dtype, const void* t, const void* dy, int64_t outer,
                                     int64_t channels, int64_t inner, int function, double slope,
                                     int from_output, const double* scale, const double* offset,
                                     const double* mean, const double* a, const double* b,
                                     const double* d, int add, void* dx, void* stream);
}
