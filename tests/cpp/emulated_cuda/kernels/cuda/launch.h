// Emulates src/kernels/cuda/launch.h. A launch runs the kernel immediately. emulated::Call returns
// an error if a test wants this call of CUDA to fail.
#pragma once
#include <cstdint>

#include "kernels/cuda/check.h"

namespace syncbn::cuda {

template <auto kKernel, typename... Parameters>
void Launch(const char* name, int64_t blocks, int threads, cudaStream_t stream,
            Parameters... arguments) {
  emulated::CheckStream(stream);
  Check(emulated::Call(), name);
  ++emulated::launches;
  emulated::Run(static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                [&] { kKernel(arguments...); });
}

inline void LoadKernels() { Check(emulated::Call(), "cudaFuncGetAttributes"); }

}  // namespace syncbn::cuda
