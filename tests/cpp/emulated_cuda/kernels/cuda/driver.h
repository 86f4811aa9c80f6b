// Emulates src/kernels/cuda/driver.h. The context of a device is its number plus one. As in CUDA,
// the functions fail until cuInit was called.
#pragma once
#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

namespace syncbn::cuda {

inline void* DriverFunction(const char* name) {
  static bool initialized = false;
  constexpr int kNotInitialized = 3;
  int (*const init)(unsigned) = [](unsigned) {
    initialized = true;
    return 0;
  };
  int (*const get)(void**) = [](void** context) {
    *context = reinterpret_cast<void*>(static_cast<intptr_t>(emulated::device + 1));
    return initialized ? 0 : kNotInitialized;
  };
  int (*const set)(void*) = [](void* context) {
    emulated::device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
    return initialized ? 0 : kNotInitialized;
  };
  if (std::strcmp(name, "cuInit") == 0) return reinterpret_cast<void*>(init);
  return std::strcmp(name, "cuCtxGetCurrent") == 0 ? reinterpret_cast<void*>(get)
                                                   : reinterpret_cast<void*>(set);
}

}  // namespace syncbn::cuda
