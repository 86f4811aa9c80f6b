// Emulates src/kernels/cuda/launch.h: a launch runs the kernel at once.
#pragma once
#include <cstdint>

#include "kernels/cuda/check.h"

namespace syncbn::cuda {

template <typename... Parameters>
void Launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
            cudaStream_t stream, Parameters... arguments) {
  emulated::CheckStream(stream);
  Check(emulated::Call(), name);
  emulated::Run(static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                [&] { kernel(arguments...); });
}

}  // namespace syncbn::cuda
