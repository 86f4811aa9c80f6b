// NVIDIA's driver, which is looked up at run time, because the library must load without it.
#pragma once
#include <dlfcn.h>

namespace syncbn::cuda {

// Returns a function of the driver, or null if there is no driver or no such function.
inline void* DriverFunction(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
  return library == nullptr ? nullptr : dlsym(library, name);
}

}  // namespace syncbn::cuda
