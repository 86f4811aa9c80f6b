// Launches a kernel, and names it if the runtime refuses.
// Who uses it: this folder.
#pragma once
#include <cstdint>

#include "kernels/cuda/check.h"

namespace syncbn::cuda {

// Arguments have exactly the kernel's types: the launch passes them by address.
template <typename... Parameters>
void Launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
            cudaStream_t stream, Parameters... arguments) {
  void* addresses[] = {&arguments...};
  Check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                         dim3(static_cast<unsigned>(threads)), addresses, 0, stream),
        name);
}

}  // namespace syncbn::cuda
