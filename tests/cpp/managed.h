// Tensors in managed memory, which a GPU and the host access, so that the same tests run in
// emulation and on a GPU, and the CUDA kernels for kernel_tests.h. Each tensor has an allocation of
// its own, so compute-sanitizer finds accesses beyond its end.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "cuda_runtime.h"
#include "kernel_problem.h"
#include "kernels/cuda/passes.h"
#include "tensor.h"

namespace test {

namespace cuda = syncbn::cuda;

inline void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::cerr << "CUDA: " << cudaGetErrorString(status) << std::endl;
  std::exit(1);
}

// Makes gpu(0) the current device, and all later tensors accessible to it.
inline void UseManagedMemory() {
  Check(cudaSetDevice(0));
  allocate = [](size_t bytes) {
    void* memory = nullptr;
    Check(cudaMallocManaged(&memory, std::max<size_t>(bytes, 1)));
    return memory;
  };
  release = [](void* memory) { Check(cudaFree(memory)); };
}

// The `Kernels` of kernel_tests.h.
struct CudaKernels {
  static constexpr int64_t kWorkspaceZeros = cuda::kWorkspaceZeros;
  static int64_t WorkspaceBytes() { return cuda::WorkspaceBytes(); }
  // Sums of four vectors are in the data's arithmetic, and sums of these in double.
  static double SumError(DType dtype, double n) {
    const double eps = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
    return eps * std::min(n, 4.0 * 8) + 0x1p-53 * n;
  }
  static double SumEps(DType dtype) { return EpsOf(dtype); }
  static void LocalMoments(const syncbn::ReductionPass& pass, void* workspace) {
    cuda::LocalMoments(pass, workspace, nullptr);
    Wait();
  }
  static void BackwardSums(const syncbn::ReductionPass& pass, void* workspace) {
    cuda::BackwardSums(pass, workspace, nullptr);
    Wait();
  }
  static void Normalize(const syncbn::ElementwisePass& pass) {
    cuda::Normalize(pass, nullptr);
    Wait();
  }
  static void BackwardApply(const syncbn::ElementwisePass& pass) {
    cuda::BackwardApply(pass, nullptr);
    Wait();
  }
  static void Wait() { Check(cudaStreamSynchronize(nullptr)); }
};

}  // namespace test
