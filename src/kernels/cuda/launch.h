// Launches a kernel, and names it if the runtime refuses; knows every kernel that anything
// launches.
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

// A kernel that is launched somewhere in the library is in the list when that is loaded.
template <auto kKernel>
inline const void* const kListed = Kernels().emplace_back(reinterpret_cast<const void*>(kKernel));

// Arguments have exactly the kernel's types: the launch passes them by address.
template <auto kKernel, typename... Parameters>
void Launch(const char* name, int64_t blocks, int threads, cudaStream_t stream,
            Parameters... arguments) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Parameters...)>);
  void* addresses[] = {&arguments...};
  Check(cudaLaunchKernel(kListed<kKernel>, dim3(static_cast<unsigned>(blocks)),
                         dim3(static_cast<unsigned>(threads)), addresses, 0, stream),
        name);
}

// Loads the code of every kernel to the current device. Newer runtimes would do it at the first
// launch, and wait there for the device, perhaps beside another library's communication.
inline void LoadKernels() {
  for (const void* kernel : Kernels()) {
    cudaFuncAttributes attributes;
    SYNCBN_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  }
}

}  // namespace syncbn::cuda
