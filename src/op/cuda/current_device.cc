// The driver's two functions are looked up at run time: the library also serves machines without
// one.
#include "op/cuda/current_device.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "kernels/cuda/check.h"

namespace syncbn::cuda {
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

void CheckDriver(int status, const char* call) {
  if (status != 0) throw DeviceError(Concat("CUDA: ", call, " failed with error ", status));
}

// No document tells if the runtime looks at the driver's context when it sets the device that it
// set last, and SetCurrent goes past it: so the context is remembered and set as well.
void MakeCurrent(const Driver& driver, int ordinal) {
  static std::mutex mutex;
  static auto& contexts = *new std::map<int, void*>;  // operators may outlive static destructors
  SYNCBN_CUDA_CHECK(cudaSetDevice(ordinal));
  std::lock_guard<std::mutex> lock(mutex);
  void*& context = contexts[ordinal];
  if (context == nullptr) {
    SYNCBN_CUDA_CHECK(cudaFree(nullptr));  // older runtimes make the context at the first use
    CheckDriver(driver.GetCurrent(&context), "cuCtxGetCurrent");
  } else {
    CheckDriver(driver.SetCurrent(context), "cuCtxSetCurrent");
  }
}

void* CurrentContext() {
  const Driver& driver = TheDriver();
  if (driver.GetCurrent == nullptr || driver.SetCurrent == nullptr) {
    throw DeviceError("CUDA: libcuda.so.1, NVIDIA's driver, cannot be loaded");
  }
  void* context = nullptr;
  CheckDriver(driver.GetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

}  // namespace

// The destructor restores the context also where Renew fails, because the other constructor has
// ended then.
CurrentDevice::CurrentDevice(int ordinal) : CurrentDevice(ordinal, CurrentContext()) { Renew(); }

void CurrentDevice::Renew() const { MakeCurrent(TheDriver(), ordinal_); }

CurrentDevice::~CurrentDevice() { TheDriver().SetCurrent(context_before_); }

}  // namespace syncbn::cuda
