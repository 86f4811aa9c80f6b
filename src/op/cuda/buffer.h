// Memory that is kept from call to call, and grows where a call needs more.
// Who uses it: lane.h and backend_cuda.cc.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

#include "op/allocator.h"

namespace syncbn::cuda {

// An Allocator of the current device.
using Take = std::function<std::shared_ptr<void>(MemoryKind kind, size_t bytes)>;

class Buffer {
 public:
  // Makes room for this many bytes. Returns whether it had to grow: contents are lost then, and
  // nothing may still work on them.
  bool Reserve(MemoryKind kind, size_t bytes, const Take& take) {
    if (bytes <= bytes_) return false;
    Free();
    memory_ = take(kind, bytes);
    bytes_ = bytes;
    return true;
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

}  // namespace syncbn::cuda
