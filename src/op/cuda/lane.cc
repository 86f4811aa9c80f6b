// Lanes and contexts are never destroyed: the runtime may end before static objects do.
#include "op/cuda/lane.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"

namespace syncbn::cuda {
namespace {

// ---- the current device ------------------------------------------------------------------------

// The driver's functions are looked up at run time, because machines without a driver also load the
// library.
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

// SetCurrent bypasses the runtime. It is not documented whether the runtime checks the driver's
// context when it sets the same device again, so this function stores the context and also sets it.
void MakeCurrent(const Driver& driver, int ordinal) {
  static std::mutex mutex;
  static auto& contexts = *new std::map<int, void*>;
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

// ---- lanes -------------------------------------------------------------------------------------

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<Lane>>> free;
};

Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

// If Renew throws, the destructor still restores the context, because the other constructor has
// ended.
CurrentDevice::CurrentDevice(int ordinal) : CurrentDevice(ordinal, CurrentContext()) { Renew(); }

void CurrentDevice::Renew() const { MakeCurrent(TheDriver(), ordinal_); }

CurrentDevice::~CurrentDevice() { TheDriver().SetCurrent(context_before_); }

Lane::Lane() {
  LoadKernels();
  // The stream does not wait for the legacy default stream, which other libraries may use.
  SYNCBN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

void* Lane::Workspace(const Allocate& allocate) {
  workspace_.Reserve(MemoryKind::kDevice, static_cast<size_t>(WorkspaceBytes()), allocate);
  if (!is_zeroed_) {
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(workspace_.data(), 0, kWorkspaceZeros, Queue()));
    is_zeroed_ = true;
  }
  return workspace_.data();
}

void Lane::Reserve(int64_t device_doubles, int64_t pinned_doubles, const Allocate& allocate) {
  const auto bytes = [](int64_t doubles) { return static_cast<size_t>(doubles) * sizeof(double); };
  device_.Reserve(MemoryKind::kDevice, bytes(device_doubles), allocate);
  pinned_.Reserve(MemoryKind::kPinned, bytes(pinned_doubles), allocate);
}

void Lane::Synchronize() {
  if (is_idle_) return;
  SYNCBN_CUDA_CHECK(cudaStreamSynchronize(stream_));
  is_idle_ = true;
}

Lane* Lane::Acquire(int ordinal) {
  Pool& pool = ThePool();
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    auto& free = pool.free[ordinal];
    if (!free.empty()) {
      Lane* lane = free.back().release();
      free.pop_back();
      return lane;
    }
  }
  return new Lane;
}

void Lane::Release(int ordinal, Lane* lane) noexcept {
  Pool& pool = ThePool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  try {
    pool.free[ordinal].emplace_back(lane);
  } catch (const std::bad_alloc&) {
    // The lane leaks.
  }
}

}  // namespace syncbn::cuda
