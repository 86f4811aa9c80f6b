// The state of one forward or backward call on a GPU: the current device of the thread, and a lane,
// which is a stream and its memory.
//
// A device has as many lanes as calls were ever pending on it at once, and each lane keeps the
// largest sizes so far. So a step allocates nothing once its shapes have been seen, and layers
// share lanes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/cuda/passes.h"
#include "op/backend.h"

namespace syncbn::cuda {

// Makes a GPU the thread's current device. The destructor restores the context that the thread had
// before, or none. Both use the driver, because cudaSetDevice would make a context on a device 0
// that the thread has never used.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  // Must follow a call of other code that may have changed the current device.
  void Renew() const;
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  CurrentDevice(int ordinal, void* before) : ordinal_(ordinal), context_before_(before) {}

  const int ordinal_;
  void* const context_before_;
};

// An Allocator for the current device.
using Allocate = std::function<std::shared_ptr<void>(MemoryKind kind, size_t bytes)>;

// Memory that later calls reuse, and that grows if a call needs more.
class Buffer {
 public:
  // Ensures a size. Growing loses the contents, which no work may still use.
  void Reserve(MemoryKind kind, size_t bytes, const Allocate& allocate) {
    if (bytes <= bytes_) return;
    Free();
    memory_ = allocate(kind, bytes);
    bytes_ = bytes;
  }
  void Free() {
    bytes_ = 0;
    memory_.reset();
  }
  void* data() const { return memory_.get(); }

 private:
  std::shared_ptr<void> memory_;
  size_t bytes_ = 0;
};

// All functions use the current device.
class Lane {
 public:
  Lane();

  // Returns the stream, for work that Synchronize waits for.
  Stream Queue() {
    is_idle_ = false;
    return stream_;
  }
  // Waits for all queued work.
  void Synchronize();

  // Returns the kernels' workspace, which one kernel at a time may use.
  void* Workspace(const Allocate& allocate);
  // Ensures this many doubles on the device and pinned on the host. Growing loses the contents.
  void Reserve(int64_t device_doubles, int64_t pinned_doubles, const Allocate& allocate);
  double* device() const { return static_cast<double*>(device_.data()); }
  double* pinned() const { return static_cast<double*>(pinned_.data()); }

  // Returns a free lane of the current device, whose number is `ordinal`, or a new lane.
  static Lane* Acquire(int ordinal);
  static void Release(int ordinal, Lane* lane) noexcept;

 private:
  Stream stream_ = nullptr;
  bool is_idle_ = true;
  Buffer workspace_, device_, pinned_;
  bool is_zeroed_ = false;  // the workspace has its zeros
};

}  // namespace syncbn::cuda
