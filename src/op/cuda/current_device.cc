// The driver's two functions are looked up at run time: the library also serves machines without one.
#include "op/cuda/current_device.h"

#include <dlfcn.h>

#include "kernels/cuda/check.h"

namespace syncbn {
namespace cuda {
namespace {

struct Driver {
  int (*GetCurrent)(void** context) = nullptr;
  int (*SetCurrent)(void* context) = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (library == nullptr) return;
    GetCurrent = reinterpret_cast<int (*)(void**)>(dlsym(library, "cuCtxGetCurrent"));
    SetCurrent = reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

}  // namespace

CurrentDevice::CurrentDevice(int ordinal) {
  const Driver& driver = TheDriver();
  if (driver.GetCurrent == nullptr || driver.SetCurrent == nullptr) {
    throw DeviceError("CUDA: libcuda.so.1, NVIDIA's driver, cannot be loaded");
  }
  if (const int status = driver.GetCurrent(&context_before_)) {
    throw DeviceError(Concat("CUDA: cuCtxGetCurrent failed with error ", status));
  }
  SYNCBN_CUDA_CHECK(cudaSetDevice(ordinal));
}

CurrentDevice::~CurrentDevice() { TheDriver().SetCurrent(context_before_); }

}  // namespace cuda
}  // namespace syncbn
