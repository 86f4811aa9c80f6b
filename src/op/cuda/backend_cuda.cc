// The backend of a GPU: one call at a time on a lane. In a training step the host waits twice in
// each phase of a layer: for the sums, and at the end. Kernels write sums directly to pinned
// memory, and one launch copies all per-channel vectors of a phase.
#include <algorithm>
#include <map>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/passes.h"
#include "op/backend.h"
#include "op/cuda/lane.h"

namespace syncbn {
namespace {

// The largest number of per-channel vectors of a call. Backward from x through an activation has 3
// inputs of the sums, 2 sums, 2 results and 5 coefficients. (Forward has 5 inputs, 2 moments, 2
// results and 3 coefficients.)
constexpr int64_t kPinnedVectors = 12;
constexpr int64_t kDeviceVectors = 8;

bool IsDouble(const Tensor& vector) { return vector.dtype == DType::kFloat64; }

class CudaBackend : public Backend {
 public:
  CudaBackend(const Device& device, Allocator allocator) : device_(device), allocator_(allocator) {}

  void Begin(const Layout& layout, const std::vector<const Tensor*>& vectors) override {
    current_ = std::make_unique<cuda::CurrentDevice>(device_.id);
    lane_ = cuda::Lane::Acquire(device_.id);
    channels_ = layout.channels;
    pinned_used_ = device_used_ = 0;
    lane_->Reserve(kDeviceVectors * channels_, kPinnedVectors * channels_, allocate_);
    // The first Synchronize waits for these copies.
    for (const Tensor* vector : vectors) {
      double* const copy = NextPinned(channels_);
      read_[vector->data] = copy;
      queued_.push_back({vector->data, copy, channels_, IsDouble(*vector), true, false});
    }
    Flush();
  }

  void Finish() override {
    Flush();
    lane_->Synchronize();
    Close();
  }

  void Abandon() noexcept override {
    if (lane_ != nullptr) {
      try {
        lane_->Synchronize();  // no work may still use the lane's memory
      } catch (const DeviceError&) {
        // A device in this state refuses every call; the first error has been reported.
      }
    }
    Close();
  }

  std::vector<double> Read(const Tensor& vector) override {
    lane_->Synchronize();
    const double* values = read_.at(vector.data);
    return std::vector<double>(values, values + channels_);
  }

  void Write(const std::vector<double>& values, WriteMode mode, const Tensor& vector) override {
    if (mode == WriteMode::kNull) return;
    queued_.push_back({Pin(values.data(), channels_), vector.data, channels_, true,
                       IsDouble(vector), mode == WriteMode::kAdd});
  }

  void LocalMoments(const ReductionPass& pass) override {
    const int64_t n = pass.layout.channels;
    ReductionPass on_device = pass;
    on_device.first = NextPinned(n);
    on_device.second = NextPinned(n);
    cuda::LocalMoments(on_device, lane_->Workspace(allocate_), lane_->Queue());
    Fetch({{on_device.first, pass.first}, {on_device.second, pass.second}}, n);
  }

  void BackwardSums(const ReductionPass& pass) override {
    const int64_t n = pass.layout.channels;
    ReductionPass on_device = pass;
    UploadInput(&on_device);
    Flush();
    on_device.first = NextPinned(n);
    on_device.second = NextPinned(n);
    cuda::BackwardSums(on_device, lane_->Workspace(allocate_), lane_->Queue());
    Fetch({{on_device.first, pass.first}, {on_device.second, pass.second}}, n);
  }

  void Normalize(const ElementwisePass& pass) override {
    ElementwisePass on_device = pass;
    for (const double** vector : {&on_device.mean, &on_device.scale, &on_device.offset}) {
      *vector = Upload(*vector, pass.layout.channels);
    }
    Flush();
    cuda::Normalize(on_device, lane_->Queue());
  }

  void BackwardApply(const ElementwisePass& pass) override {
    ElementwisePass on_device = pass;
    UploadInput(&on_device);
    on_device.scale_xmu = Upload(pass.scale_xmu, pass.layout.channels);
    on_device.shift = Upload(pass.shift, pass.layout.channels);
    Flush();
    cuda::BackwardApply(on_device, lane_->Queue());
  }

  const void* Keep(const void* tensor, size_t bytes) override {
    if (bytes == 0) return nullptr;
    kept_.Reserve(MemoryKind::kDevice, bytes, allocate_);  // earlier calls waited for their kernels
    SYNCBN_CUDA_CHECK(
        cudaMemcpyAsync(kept_.data(), tensor, bytes, cudaMemcpyDefault, lane_->Queue()));
    return kept_.data();
  }

  void Forget() override { kept_.Free(); }

 private:
  double* NextPinned(int64_t size) {
    return Next(lane_->pinned(), &pinned_used_, kPinnedVectors, size);
  }

  double* NextDevice(int64_t size) {
    return Next(lane_->device(), &device_used_, kDeviceVectors, size);
  }

  // Returns the next `size` numbers of the memory that Begin has reserved.
  double* Next(double* reserved, int64_t* used, int64_t vectors, int64_t size) const {
    double* const next = reserved + *used;
    *used += size;
    if (*used <= vectors * channels_) return next;
    throw DeviceError(Concat("a call must have at most ", vectors, " vectors, got more"));
  }

  double* Pin(const double* values, int64_t size) {
    double* const pinned = NextPinned(size);
    std::copy_n(values, size, pinned);
    return pinned;
  }

  // Returns an address on the device that has the values after the next Flush.
  const double* Upload(const double* values, int64_t size) {
    double* const device = NextDevice(size);
    queued_.push_back({Pin(values, size), device, size, true, true, false});
    return device;
  }

  // Uploads the per-channel arrays that kernels read.
  void UploadInput(PassInput* input) {
    const int64_t n = input->layout.channels;
    const bool reads_z = input->from_output || input->activation.function != Function::kIdentity;
    input->scale = Upload(input->scale, n);
    input->offset = reads_z ? Upload(input->offset, n) : nullptr;
    input->mean = input->from_output ? nullptr : Upload(input->mean, n);
  }

  void Flush() {
    if (queued_.empty()) return;
    cuda::CopyVectors(queued_, lane_->Queue());
    queued_.clear();
  }

  // Waits for results in pinned memory and copies them.
  void Fetch(std::initializer_list<std::pair<const double*, double*>> results, int64_t size) {
    lane_->Synchronize();
    for (const auto& result : results) std::copy_n(result.first, size, result.second);
  }

  void Close() noexcept {
    if (lane_ != nullptr) cuda::Lane::Release(device_.id, lane_);
    lane_ = nullptr;
    current_.reset();
    read_.clear();
    queued_.clear();
  }

  const Device device_;
  const Allocator allocator_;
  const cuda::Allocate allocate_ = [this](MemoryKind kind, size_t bytes) {
    const std::shared_ptr<void> memory = allocator_(device_, kind, bytes);
    current_->Renew();
    return memory;
  };
  cuda::Buffer kept_;
  // The state of the current call:
  std::unique_ptr<cuda::CurrentDevice> current_;
  cuda::Lane* lane_ = nullptr;
  int64_t channels_ = 0;
  int64_t pinned_used_ = 0, device_used_ = 0;  // doubles
  std::map<const void*, const double*> read_;
  std::vector<cuda::VectorCopy> queued_;
};

}  // namespace

std::unique_ptr<Backend> MakeCudaBackend(const Device& device, Allocator allocator) {
  int count = 0;
  try {
    SYNCBN_CUDA_CHECK(cudaGetDeviceCount(&count));
  } catch (const DeviceError& error) {
    throw Error(Concat("SyncBatchNorm on ", device.Name(), ": ", error.what()));
  }
  if (device.id < 0 || device.id >= count) {
    throw Error(Concat("SyncBatchNorm on ", device.Name(), ": the device must be one of the ",
                       count, " CUDA devices of this process"));
  }
  return std::make_unique<CudaBackend>(device, allocator);
}

}  // namespace syncbn
