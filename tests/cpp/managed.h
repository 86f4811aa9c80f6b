// Tensors in managed memory, which a GPU and the host access, so that the same tests run in
// emulation and on a GPU. Each block is an allocation, so compute-sanitizer finds accesses beyond
// its end.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "cuda_runtime.h"
#include "tensor.h"

namespace test {

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

}  // namespace test
