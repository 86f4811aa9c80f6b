// What one forward or backward call needs on a GPU: a stream and memory, kept for the next call.
// Who uses it: backend_cuda.cc. It must not know what is computed.
//
// A device has as many lanes as calls were ever under way on it at once, and each keeps the largest
// size that it has met. So a step allocates nothing once its shapes have been seen, and layers share.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/batch_norm_cuda.h"

namespace syncbn {
namespace cuda {

class Lane {
 public:
  // On the current device, like all the rest.
  Lane();

  Stream stream() const { return stream_; }

  // The kernels' workspace, of this many bytes at least, for one kernel after the other.
  void* Workspace(int64_t bytes);
  // Makes room for this many doubles on the device and pinned on the host. Contents are lost where
  // it has to grow.
  void Reserve(int64_t device_doubles, int64_t pinned_doubles);
  double* device() const { return device_; }
  double* pinned() const { return pinned_; }

  void Synchronize();

  // A free lane of the current device, whose number is `ordinal`; made if there is none.
  static Lane* Acquire(int ordinal);
  static void Release(int ordinal, Lane* lane);

 private:
  Stream stream_ = nullptr;
  void* workspace_ = nullptr;
  double *device_ = nullptr, *pinned_ = nullptr;
  int64_t workspace_bytes_ = 0, device_doubles_ = 0, pinned_doubles_ = 0;
};

}  // namespace cuda
}  // namespace syncbn
