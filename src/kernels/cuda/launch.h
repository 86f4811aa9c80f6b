// Launches kernels, and loads all kernels of the library.
#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernels/cuda/check.h"

namespace syncbn::cuda {

inline std::vector<const void*>& Kernels() {
  static auto& kernels = *new std::vector<const void*>;
  return kernels;
}

// When the library is loaded, this adds each kernel for which Launch is compiled to Kernels().
template <auto kKernel>
inline const void* const kListed = Kernels().emplace_back(reinterpret_cast<const void*>(kKernel));

// `name` is the kernel's name in errors. Arguments must have exactly the kernel's types, because
// the launch passes their addresses.
template <auto kKernel, typename... Parameters>
void Launch(const char* name, int64_t blocks, int threads, cudaStream_t stream,
            Parameters... arguments) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Parameters...)>);
  void* addresses[] = {&arguments...};
  Check(cudaLaunchKernel(kListed<kKernel>, dim3(static_cast<unsigned>(blocks)),
                         dim3(static_cast<unsigned>(threads)), addresses, 0, stream),
        name);
}

// Loads every kernel to the current device. Newer runtimes would load a kernel at its first launch,
// and wait for the device then. During an operation of NCCL that is a deadlock.
inline void LoadKernels() {
  for (const void* kernel : Kernels()) {
    cudaFuncAttributes attributes;
    SYNCBN_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  }
}

}  // namespace syncbn::cuda
