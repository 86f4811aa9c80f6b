// Checked calls of the CUDA runtime.
#pragma once
#include <cuda_runtime.h>

#include "core/error.h"

namespace syncbn::cuda {

inline void Check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that the next call does not report it
  throw DeviceError(Concat("CUDA: ", call, " failed: ", cudaGetErrorString(status), " (",
                           cudaGetErrorName(status), ")"));
}

#define SYNCBN_CUDA_CHECK(call) ::syncbn::cuda::Check(call, #call)

inline int Multiprocessors() {
  int device = 0, count = 0;
  SYNCBN_CUDA_CHECK(cudaGetDevice(&device));
  SYNCBN_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace syncbn::cuda
