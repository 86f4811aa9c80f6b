// The stream and the memory of one forward or backward call on a GPU, kept for the next call. It
// must not know what is computed.
//
// A device has as many lanes as calls were ever under way on it at once, and each keeps the largest
// size that it has met. So a step allocates nothing once its shapes have been seen, and layers
// share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/cuda/passes.h"
#include "op/backend.h"

namespace syncbn::cuda {

// An Allocator of the current device.
using Take = std::function<std::shared_ptr<void>(MemoryKind kind, size_t bytes)>;

// Memory that is kept from call to call, and grows where a call needs more.
class Buffer {
 public:
  // Makes room for this many bytes. Where it has to grow the contents are lost, and nothing may
  // still work on them.
  void Reserve(MemoryKind kind, size_t bytes, const Take& take) {
    if (bytes <= bytes_) return;
    Free();
    memory_ = take(kind, bytes);
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

class Lane {
 public:
  // On the current device, like all the rest.
  Lane();

  // The stream, for work that Synchronize is to wait for.
  Stream Queue() {
    is_idle_ = false;
    return stream_;
  }
  // Waits for all that was queued.
  void Synchronize();

  // The kernels' workspace, for one kernel after the other.
  void* Workspace(const Take& take);
  // Makes room for this many doubles on the device and pinned on the host. Growing loses the
  // contents.
  void Reserve(int64_t device_doubles, int64_t pinned_doubles, const Take& take);
  double* device() const { return static_cast<double*>(device_.data()); }
  double* pinned() const { return static_cast<double*>(pinned_.data()); }

  // A free lane of the current device, whose number is `ordinal`; created if all are in use.
  static Lane* Acquire(int ordinal);
  static void Release(int ordinal, Lane* lane) noexcept;

 private:
  Stream stream_ = nullptr;
  bool is_idle_ = true;
  Buffer workspace_, device_, pinned_;
  bool zeroed_ = false;  // the workspace's zeros
};

}  // namespace syncbn::cuda
