// The device that a layer computes on: one interface for all kinds of devices. It must not know
// other devices.
//
// Tensors live on the device. Per-channel numbers that the layer's arithmetic works with are
// double, on the host. Calls stand between Begin and Finish, in one thread at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/device.h"
#include "core/layout.h"
#include "kernels/passes.h"
#include "op/tensor.h"

namespace syncbn {

// The kinds of a backend's memory, apart from its tensors: of the device; or pinned memory of the
// host, which the device reaches under the same address.
enum class MemoryKind { kDevice, kPinned };

// At least `bytes` with any contents. They are freed with the last copy of the pointer, when no
// work may use them any more. May leave the thread with another current device.
// Throws DeviceError.
using Allocator = std::shared_ptr<void> (*)(const Device& device, MemoryKind kind, size_t bytes);

class Backend {
 public:
  virtual ~Backend() = default;

  // Opens a forward or backward call. `vectors` are the per-channel tensors that it will Read, as
  // they are now. Tensors that a device writes are not touched before the next call.
  virtual void Begin(const Layout& layout, const std::vector<const Tensor*>& vectors) = 0;
  // Closes the call: everything is written.
  virtual void Finish() = 0;
  // Closes a call that has failed. What it was to write is undefined.
  virtual void Abandon() noexcept = 0;

  virtual std::vector<double> Read(const Tensor& vector) = 0;
  virtual void Write(const std::vector<double>& values, WriteMode mode, const Tensor& vector) = 0;

  // The kernels. A pass's tensors are on the device, its per-channel arrays on the host.
  virtual void LocalMoments(const ReductionPass& pass) = 0;
  virtual void Normalize(const ElementwisePass& pass) = 0;
  virtual void BackwardSums(const ReductionPass& pass) = 0;
  virtual void BackwardApply(const ElementwisePass& pass) = 0;

  // Copies a tensor on the device, and returns the copy. It lasts from call to call, until the next
  // Keep or Forget, or until the backend ends.
  virtual const void* Keep(const void* tensor, size_t bytes) = 0;
  virtual void Forget() = 0;
};

// The backend of this device; a GPU's takes its memory from `allocator`, a CPU's needs none.
// Throws Error for a GPU if the library was built without CUDA, or if the process sees no such GPU.
std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator);

// The two that MakeBackend chooses between; MakeCudaBackend exists in builds with CUDA.
std::unique_ptr<Backend> MakeCpuBackend();
std::unique_ptr<Backend> MakeCudaBackend(const Device& device, Allocator allocator);

}  // namespace syncbn
