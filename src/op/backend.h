// The interface of the device that a layer computes on.
//
// Tensors are on the device; per-channel tensors are float32 or float64. The layer computes
// per-channel numbers in double on the host. All calls are between Begin and Finish, in one thread
// at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"
#include "core/layout.h"
#include "kernels/passes.h"

namespace syncbn {

// Memory that a framework passes to the operator, which does not own it.
struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
};

// Scratch memory: on the device, or pinned on the host, where the device uses the same address.
enum class MemoryKind { kDevice, kPinned };

// Returns at least `bytes` with any contents. The last copy of the pointer frees the memory, so no
// work may use it then. The thread may have another current device afterwards. Throws DeviceError.
using Allocator = std::shared_ptr<void> (*)(const Device& device, MemoryKind kind, size_t bytes);

class Backend {
 public:
  virtual ~Backend() = default;

  // Begins a forward or backward call. `vectors` are the per-channel tensors that Read accepts;
  // Read returns their present values. Tensors that a device writes must not change before the next
  // call.
  virtual void Begin(const Layout& layout, const std::vector<const Tensor*>& vectors) = 0;
  // Ends the call when everything is written.
  virtual void Finish() = 0;
  // Ends a call that has failed. Its results are undefined.
  virtual void Abandon() noexcept = 0;

  virtual std::vector<double> Read(const Tensor& vector) = 0;
  virtual void Write(const std::vector<double>& values, WriteMode mode, const Tensor& vector) = 0;

  // The kernels. The tensors of a pass are on the device, its per-channel arrays on the host.
  virtual void LocalMoments(const ReductionPass& pass) = 0;
  virtual void Normalize(const ElementwisePass& pass) = 0;
  virtual void BackwardSums(const ReductionPass& pass) = 0;
  virtual void BackwardApply(const ElementwisePass& pass) = 0;

  // Copies a tensor on the device and returns the copy, which exists until the next Keep or Forget.
  virtual const void* Keep(const void* tensor, size_t bytes) = 0;
  virtual void Forget() = 0;
};

// Returns the backend of a device. Only GPUs use the allocator. Throws Error for a GPU if the
// library was built without CUDA, or if the process has no such GPU.
std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator);

// MakeBackend calls one of these; MakeCudaBackend exists in builds with CUDA.
std::unique_ptr<Backend> MakeCpuBackend();
std::unique_ptr<Backend> MakeCudaBackend(const Device& device, Allocator allocator);

}  // namespace syncbn
