// The CUDA kernels for kernel_tests.h, and tensors in memory that a GPU and the host can access.
#pragma once
#include <algorithm>

#include "check.h"
#include "cuda_runtime.h"
#include "kernel_problem.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/passes.h"
#include "tensor.h"

namespace test {

namespace cuda = syncbn::cuda;

// Makes gpu(0) the current device, and allocates all later tensors for it.
inline void UseManagedMemory() {
  SYNCBN_CUDA_CHECK(cudaSetDevice(0));
  allocate = [](size_t bytes) {
    void* memory = nullptr;
    SYNCBN_CUDA_CHECK(cudaMallocManaged(&memory, std::max<size_t>(bytes, 1)));
    return memory;
  };
  release = [](void* memory) { SYNCBN_CUDA_CHECK(cudaFree(memory)); };
}

// The `Kernels` of kernel_tests.h.
struct CudaKernels {
  // A kernel adds at most 4 vectors of 8 elements in the dtype's arithmetic, which is float32 or
  // float64. All other sums are float64.
  static double SumError(DType dtype, double n) {
    return EpsOf(dtype) * std::min(n, 4.0 * 8) + kEps64 * n;
  }
  static double SumEps(DType dtype) { return EpsOf(dtype); }
  static void LocalMoments(const syncbn::ReductionPass& pass) { Reduce(pass, cuda::LocalMoments); }
  static void BackwardSums(const syncbn::ReductionPass& pass) { Reduce(pass, cuda::BackwardSums); }
  static void Normalize(const syncbn::ElementwisePass& pass) {
    cuda::Normalize(pass, nullptr);
    Wait();
  }
  static void BackwardApply(const syncbn::ElementwisePass& pass) {
    cuda::BackwardApply(pass, nullptr);
    Wait();
  }

 private:
  static void Wait() { SYNCBN_CUDA_CHECK(cudaStreamSynchronize(nullptr)); }

  // The workspace begins with zeros, which the kernel must restore. The rest is initially NaN.
  static void Reduce(const syncbn::ReductionPass& pass,
                     void (*reduce)(const syncbn::ReductionPass&, void*, cudaStream_t)) {
    Tensor workspace(DType::kFloat64, cuda::WorkspaceBytes() / 8);
    constexpr int64_t kZeros = cuda::kWorkspaceZeros / 8;
    for (int64_t i = 0; i < kZeros; ++i) workspace.Set(i, 0);
    reduce(pass, workspace.data(), nullptr);
    Wait();
    for (int64_t i = 0; i < kZeros; ++i) CHECK_EQ(workspace.Get(i), 0.0, Describe(pass.layout));
    CHECK(workspace.GuardsAreIntact(), Describe(pass.layout));
  }
};

}  // namespace test
