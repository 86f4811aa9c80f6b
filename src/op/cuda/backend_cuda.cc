// A GPU as a backend: one call at a time on a lane. In a training step the host waits twice for one
// layer and phase: for the sums, and at the end. Kernels write sums straight to
// pinned memory, and all per-channel vectors of a phase move in one launch, so no copy of them is
// queued.
#include <algorithm>
#include <map>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/vectors.h"
#include "op/backend.h"
#include "op/cuda/current_device.h"
#include "op/cuda/lane.h"

namespace syncbn {
namespace {

// The most per-channel vectors of one call, a backward from x through an activation: 3 for sums, 2
// sums, 2 written, 5 coefficients. (A forward has 5 read, 2 moments, 2 written, 3 coefficients.)
constexpr int64_t kPinnedVectors = 12;
constexpr int64_t kDeviceVectors = 8;

bool IsDouble(const Tensor& vector) { return vector.dtype == DType::kFloat64; }

class CudaBackend : public Backend {
 public:
  CudaBackend(const Device& device, Allocator allocator) : device_(device), allocator_(allocator) {}

  void Begin(const Layout& layout, const std::vector<const Tensor*>& vectors) override {
    for (const Tensor* vector : vectors) CheckIsParameter(*vector);
    current_ = std::make_unique<cuda::CurrentDevice>(device_.id);
    lane_ = cuda::Lane::Acquire(device_.id);
    channels_ = layout.channels;
    pinned_used_ = device_used_ = 0;
    lane_->Reserve(kDeviceVectors * channels_, kPinnedVectors * channels_, take_);
    // They arrive by the time of the first Synchronize.
    for (const Tensor* vector : vectors) {
      double* const copy = TakePinned(channels_);
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
        lane_->Synchronize();  // nothing may still use its memory
      } catch (const DeviceError&) {
        // Reported already: a device in this state refuses everything.
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
    CheckIsParameter(vector);
    queued_.push_back({Pin(values.data(), channels_), vector.data, channels_, true,
                       IsDouble(vector), mode == WriteMode::kAdd});
  }

  void LocalMoments(const ReductionPass& pass) override {
    const int64_t n = pass.layout.channels;
    ReductionPass on_device = pass;
    on_device.first = TakePinned(n);
    on_device.second = TakePinned(n);
    cuda::LocalMoments(on_device, lane_->Workspace(take_), lane_->Queue());
    Fetch({{on_device.first, pass.first}, {on_device.second, pass.second}}, n);
  }

  void BackwardSums(const ReductionPass& pass) override {
    const int64_t n = pass.layout.channels;
    ReductionPass on_device = pass;
    UploadInput(&on_device);
    Flush();
    on_device.first = TakePinned(n);
    on_device.second = TakePinned(n);
    cuda::BackwardSums(on_device, lane_->Workspace(take_), lane_->Queue());
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
    kept_.Reserve(MemoryKind::kDevice, bytes, take_);  // earlier calls waited for their kernels
    SYNCBN_CUDA_CHECK(
        cudaMemcpyAsync(kept_.data(), tensor, bytes, cudaMemcpyDefault, lane_->Queue()));
    return kept_.data();
  }

  void Forget() override { kept_.Free(); }

 private:
  double* TakePinned(int64_t size) {
    return Take(lane_->pinned(), &pinned_used_, kPinnedVectors, size);
  }

  double* TakeDevice(int64_t size) {
    return Take(lane_->device(), &device_used_, kDeviceVectors, size);
  }

  // The next `size` numbers of what Begin has reserved.
  double* Take(double* reserved, int64_t* used, int64_t vectors, int64_t size) const {
    double* const taken = reserved + *used;
    *used += size;
    if (*used <= vectors * channels_) return taken;
    throw DeviceError(Concat("a call needs more than ", vectors, " vectors"));
  }

  double* Pin(const double* values, int64_t size) {
    double* const pinned = TakePinned(size);
    std::copy_n(values, size, pinned);
    return pinned;
  }

  // The address on the device that has the values after the next Flush.
  const double* Upload(const double* values, int64_t size) {
    double* const device = TakeDevice(size);
    queued_.push_back({Pin(values, size), device, size, true, true, false});
    return device;
  }

  // Without the vectors that kernels do not read.
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

  // Waits for results in pinned memory.
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
  const cuda::Take take_ = [this](MemoryKind kind, size_t bytes) {
    const std::shared_ptr<void> memory = allocator_(device_, kind, bytes);
    current_->Renew();
    return memory;
  };
  cuda::Buffer kept_;
  // Of the call under way.
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
    throw Error(Concat("SyncBatchNorm on ", device.Name(), ": this process sees ", count,
                       " CUDA devices"));
  }
  return std::make_unique<CudaBackend>(device, allocator);
}

}  // namespace syncbn
