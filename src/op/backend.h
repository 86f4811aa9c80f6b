// The interface of the device that a layer computes on.
//
// Tensors are on the device; per-channel tensors are float32 or float64. Per-channel numbers on the
// host are double. One thread at a time calls a backend, Begin first, and Finish or Abandon last.
#pragma once
#include <memory>
#include <vector>

#include "core/device.h"
#include "core/tensor.h"
#include "kernels/passes.h"

namespace syncbn {

// Scratch memory on the device, or pinned memory of the host that the device can access.
enum class MemoryKind { kDevice, kPinned };

// Returns uninitialized memory. The caller must not delete the last copy of the pointer while work
// uses the memory. An allocator may change the thread's current device. Throws DeviceError.
using Allocator = std::shared_ptr<void> (*)(const Device& device, MemoryKind kind, size_t bytes);

class Backend {
 public:
  virtual ~Backend() = default;

  // Begins a forward or backward call. Read will return the values that the per-channel tensors
  // `vectors` have now.
  virtual void Begin(const Layout& /*layout*/, const std::vector<const Tensor*>& /*vectors*/) {}
  // Waits until all results are written, and ends the call.
  virtual void Finish() {}
  // Ends a call that has failed.
  virtual void Abandon() noexcept {}

  virtual std::vector<double> Read(const Tensor& vector) = 0;
  // Writes a number for each channel.
  virtual void Write(const double* values, WriteMode mode, const Tensor& vector) = 0;

  // The kernels. The tensors of a pass are on the device, its per-channel arrays on the host.
  virtual void LocalMoments(const ReductionPass& pass) = 0;
  virtual void Normalize(const ElementwisePass& pass) = 0;
  virtual void BackwardSums(const ReductionPass& pass) = 0;
  virtual void BackwardApply(const ElementwisePass& pass) = 0;

  // Copies a tensor and returns the copy, which lasts beyond Finish until the next Keep or Forget.
  virtual const void* Keep(const void* tensor, size_t bytes) = 0;
  virtual void Forget() = 0;
};

// Returns the backend of a device. Only GPUs use the allocator. Throws Error for a GPU if the
// library was built without CUDA.
std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator);
std::unique_ptr<Backend> MakeCpuBackend();
std::unique_ptr<Backend> MakeCudaBackend(const Device& device, Allocator allocator);

}  // namespace syncbn
