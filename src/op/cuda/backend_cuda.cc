// One call at a time on a lane of the GPU. The host waits twice in a training step of one layer and
// phase: for the sums, and at the end. Kernels write sums straight to pinned memory, and all
// per-channel vectors of a phase move in one launch, so no copy is queued at all.
#include "op/cuda/backend_cuda.h"

#include <algorithm>
#include <map>

#include "core/error.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/vectors.h"
#include "op/cuda/current_device.h"
#include "op/cuda/lane.h"

namespace syncbn {
namespace {

// Per-channel vectors of one call at most. Forward: 4 read, 2 moments, 2 written, 3 coefficients;
// backward: 1 read, the mean for the sums, 2 sums, 2 written, 4 coefficients.
constexpr int64_t kPinnedVectors = 11;
constexpr int64_t kDeviceVectors = 5;

bool IsDouble(const Tensor& vector) { return vector.dtype == DType::kFloat64; }

cuda::Write ToWrite(Request request) {
  return request == Request::kAdd ? cuda::Write::kAdd : cuda::Write::kAssign;
}

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(int ordinal) : ordinal_(ordinal) {}

  void Begin(const Layout& layout, DType dtype,
             std::initializer_list<const Tensor*> vectors) override {
    for (const Tensor* vector : vectors) CheckIsParameter(*vector);
    current_ = std::make_unique<cuda::CurrentDevice>(ordinal_);
    lane_ = cuda::Lane::Acquire(ordinal_);
    channels_ = layout.channels;
    pinned_used_ = device_used_ = 0;
    lane_->Reserve(cuda::WorkspaceBytes(dtype, layout), kDeviceVectors * channels_,
                   kPinnedVectors * channels_);
    // They arrive by the time of the first Synchronize.
    for (const Tensor* vector : vectors) {
      double* const copy = TakePinned();
      read_[vector->data] = copy;
      queued_.push_back({vector->data, copy, IsDouble(*vector), true, false});
    }
    Flush();
    synchronized_ = false;
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
    if (!synchronized_) lane_->Synchronize();
    synchronized_ = true;
    const double* values = read_.at(vector.data);
    return std::vector<double>(values, values + channels_);
  }

  void Write(const std::vector<double>& values, Request request, const Tensor& vector) override {
    if (request == Request::kNull) return;
    CheckIsParameter(vector);
    queued_.push_back({Pin(values.data()), vector.data, true, IsDouble(vector),
                       request == Request::kAdd});
  }

  void LocalMoments(const Tensor& x, const Layout& layout, double* mean, double* m2) override {
    double *const pinned_mean = TakePinned(), *const pinned_m2 = TakePinned();
    cuda::LocalMoments(x.dtype, x.data, layout, lane_->workspace(), pinned_mean, pinned_m2,
                       lane_->stream());
    Fetch({{pinned_mean, mean}, {pinned_m2, m2}});
  }

  void BackwardSums(const Tensor& x, const Tensor& dy, const Layout& layout, const double* mean,
                    double* sum_dy, double* sum_dy_xmu) override {
    const double* const device_mean = Upload(mean);
    Flush();
    double *const pinned_dy = TakePinned(), *const pinned_dy_xmu = TakePinned();
    cuda::BackwardSums(x.dtype, x.data, dy.data, layout, device_mean, lane_->workspace(), pinned_dy,
                       pinned_dy_xmu, lane_->stream());
    Fetch({{pinned_dy, sum_dy}, {pinned_dy_xmu, sum_dy_xmu}});
  }

  void Normalize(const Tensor& x, const Layout& layout, const double* mean, const double* scale,
                 const double* offset, Request request, const Tensor& y) override {
    const double *const device_mean = Upload(mean), *const device_scale = Upload(scale);
    const double* const device_offset = Upload(offset);
    Flush();
    cuda::Normalize(x.dtype, x.data, layout, device_mean, device_scale, device_offset,
                    ToWrite(request), y.data, lane_->stream());
  }

  void BackwardApply(const Tensor& x, const Tensor& dy, const Layout& layout, const double* mean,
                     const double* a, const double* b, const double* d, Request request,
                     const Tensor& dx) override {
    const double *const device_mean = Upload(mean), *const device_a = Upload(a);
    const double *const device_b = Upload(b), *const device_d = Upload(d);
    Flush();
    cuda::BackwardApply(x.dtype, x.data, dy.data, layout, device_mean, device_a, device_b, device_d,
                        ToWrite(request), dx.data, lane_->stream());
  }

 private:
  double* TakePinned() { return lane_->pinned() + channels_ * pinned_used_++; }

  double* Pin(const double* values) {
    double* const pinned = TakePinned();
    std::copy_n(values, channels_, pinned);
    return pinned;
  }

  // Where the values will be on the device after the next Flush.
  const double* Upload(const double* values) {
    double* const device = lane_->device() + channels_ * device_used_++;
    queued_.push_back({Pin(values), device, true, true, false});
    return device;
  }

  void Flush() {
    cuda::CopyVectors(queued_, channels_, lane_->stream());
    queued_.clear();
  }

  // Waits for results in pinned memory.
  void Fetch(std::initializer_list<std::pair<const double*, double*>> results) {
    lane_->Synchronize();
    synchronized_ = true;
    for (const auto& result : results) std::copy_n(result.first, channels_, result.second);
  }

  void Close() noexcept {
    if (lane_ != nullptr) cuda::Lane::Release(ordinal_, lane_);
    lane_ = nullptr;
    current_.reset();
    read_.clear();
    queued_.clear();
  }

  const int ordinal_;
  // Of the call under way.
  std::unique_ptr<cuda::CurrentDevice> current_;
  cuda::Lane* lane_ = nullptr;
  int64_t channels_ = 0, pinned_used_ = 0, device_used_ = 0;
  bool synchronized_ = false;
  std::map<const void*, const double*> read_;
  std::vector<cuda::VectorCopy> queued_;
};

}  // namespace

std::unique_ptr<Backend> MakeCudaBackend(const Device& device) {
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
  return std::make_unique<CudaBackend>(device.id);
}

}  // namespace syncbn
