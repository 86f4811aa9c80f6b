// The backend of a GPU. Kernels write moments and sums directly to pinned memory. The host waits
// for these numbers, and waits again at the end of each forward or backward call.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "op/backend.h"

namespace syncbn {
namespace {

void CheckDriver(int status, const char* call) {
  if (status != 0) throw DeviceError(Concat("CUDA: ", call, " failed with error ", status));
}

struct Driver {
  int (*GetCurrent)(void** context) = Find<int(void**)>("cuCtxGetCurrent");
  int (*SetCurrent)(void* context) = Find<int(void*)>("cuCtxSetCurrent");

  // The other functions fail until somebody in the process has called cuInit.
  Driver() { CheckDriver(Find<int(unsigned)>("cuInit")(0), "cuInit"); }

  template <typename Function>
  static Function* Find(const char* name) {
    if (void* const function = cuda::DriverFunction(name)) {
      return reinterpret_cast<Function*>(function);
    }
    throw DeviceError("CUDA: libcuda.so.1, NVIDIA's driver, cannot be loaded");
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

void* CurrentContext() {
  void* context = nullptr;
  CheckDriver(TheDriver().GetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

// Makes a GPU the thread's current device. The destructor restores the thread's previous context.
// It calls the driver, because cudaSetDevice would make a context on a GPU that has none.
class CurrentDevice {
 public:
  // If Set throws, the destructor runs, because the delegated constructor has ended.
  explicit CurrentDevice(int ordinal) : CurrentDevice(ordinal, CurrentContext()) { Set(); }
  ~CurrentDevice() { TheDriver().SetCurrent(context_before_); }
  CurrentDevice(const CurrentDevice&) = delete;

  // Must be called again after other code that may have changed the current device. This function
  // also sets the context, because cudaSetDevice may not notice that ~CurrentDevice has changed it.
  void Set() const {
    static std::mutex mutex;
    static auto& contexts = *new std::map<int, void*>;
    SYNCBN_CUDA_CHECK(cudaSetDevice(ordinal_));
    std::lock_guard<std::mutex> lock(mutex);
    void*& context = contexts[ordinal_];
    if (context == nullptr) {
      SYNCBN_CUDA_CHECK(cudaFree(nullptr));  // older runtimes make the context at the first use
      context = CurrentContext();
    } else {
      CheckDriver(TheDriver().SetCurrent(context), "cuCtxSetCurrent");
    }
  }

 private:
  CurrentDevice(int ordinal, void* before) : ordinal_(ordinal), context_before_(before) {}

  const int ordinal_;
  void* const context_before_;
};

struct Buffer {
  std::shared_ptr<void> memory;
  size_t bytes = 0;
};

// A stream and its scratch memory. One forward or backward call uses a lane at a time. Later calls
// of any layer on the same device can reuse the lane.
class Lane {
 public:
  Lane() {
    cuda::LoadKernels();
    // Work of other libraries on the default stream must not block this stream.
    SYNCBN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  cudaStream_t UseStream() {
    is_idle_ = false;
    return stream_;
  }

  void Synchronize() {
    if (is_idle_) return;
    SYNCBN_CUDA_CHECK(cudaStreamSynchronize(stream_));
    is_idle_ = true;
  }

  // Returns a free lane of the current device, whose number is `ordinal`, or a new lane.
  static Lane* Acquire(int ordinal) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& free = free_[ordinal];
    if (free.empty()) {
      lock.unlock();
      return new Lane;
    }
    Lane* const lane = free.back();
    free.pop_back();
    return lane;
  }

  static void Release(int ordinal, Lane* lane) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      free_[ordinal].emplace_back(lane);
    } catch (const std::bad_alloc&) {
      // The lane leaks.
    }
  }

  Buffer device, pinned;   // per-channel vectors
  Buffer workspace;        // see kernels/cuda/passes.h
  bool has_zeros = false;  // the first kWorkspaceZeros bytes of the workspace were set to zero

 private:
  static inline std::mutex mutex_;
  // Never destroyed, because operators may outlive static objects. Lanes are not destroyed either,
  // because the CUDA runtime may end before them.
  static inline auto& free_ = *new std::map<int, std::vector<Lane*>>;

  cudaStream_t stream_ = nullptr;
  bool is_idle_ = true;
};

// The largest numbers of per-channel vectors in a call, here counted for backward.
constexpr int64_t kDeviceVectors = 8;   // 3 for BackwardSums and 5 for BackwardApply
constexpr int64_t kPinnedVectors = 12;  // these 8, the 2 results of BackwardSums, dgamma and dbeta

bool IsDouble(const Tensor& vector) { return vector.dtype == DType::kFloat64; }

class CudaBackend : public Backend {
 public:
  CudaBackend(const Device& device, Allocator allocator) : device_(device), allocator_(allocator) {}

  void Begin(const Layout& layout, const std::vector<const Tensor*>& vectors) override {
    current_ = std::make_unique<CurrentDevice>(device_.id);
    lane_ = Lane::Acquire(device_.id);
    channels_ = layout.channels;
    pinned_used_ = device_used_ = 0;
    const size_t vector_bytes = static_cast<size_t>(channels_) * sizeof(double);
    Reserve(&lane_->device, MemoryKind::kDevice, kDeviceVectors * vector_bytes);
    Reserve(&lane_->pinned, MemoryKind::kPinned, kPinnedVectors * vector_bytes);
    // The first Synchronize waits for these copies.
    for (const Tensor* vector : vectors) {
      double* const copy = NextPinned();
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
        lane_->Synchronize();  // pending work may use the lane's memory
      } catch (const DeviceError&) {
        // The first error is reported.
      }
    }
    Close();
  }

  std::vector<double> Read(const Tensor& vector) override {
    lane_->Synchronize();
    const double* values = read_.at(vector.data);
    return std::vector<double>(values, values + channels_);
  }

  void Write(const double* values, WriteMode mode, const Tensor& vector) override {
    if (mode == WriteMode::kNull) return;
    queued_.push_back(
        {Pin(values), vector.data, channels_, true, IsDouble(vector), mode == WriteMode::kAdd});
  }

  void LocalMoments(const ReductionPass& pass) override { Reduce(pass, cuda::LocalMoments); }

  void BackwardSums(const ReductionPass& pass) override {
    ReductionPass on_device = pass;
    UploadInput(&on_device);
    Flush();
    Reduce(on_device, cuda::BackwardSums);
  }

  void Normalize(const ElementwisePass& pass) override {
    ElementwisePass on_device = pass;
    for (const double** vector : {&on_device.mean, &on_device.scale, &on_device.offset}) {
      *vector = Upload(*vector);
    }
    Flush();
    cuda::Normalize(on_device, lane_->UseStream());
  }

  void BackwardApply(const ElementwisePass& pass) override {
    ElementwisePass on_device = pass;
    UploadInput(&on_device);
    on_device.scale_xmu = Upload(pass.scale_xmu);
    on_device.shift = Upload(pass.shift);
    Flush();
    cuda::BackwardApply(on_device, lane_->UseStream());
  }

  const void* Keep(const void* tensor, size_t bytes) override {
    if (bytes == 0) return nullptr;
    void* const kept = Reserve(&kept_, MemoryKind::kDevice, bytes);
    SYNCBN_CUDA_CHECK(cudaMemcpyAsync(kept, tensor, bytes, cudaMemcpyDefault, lane_->UseStream()));
    return kept;
  }

  void Forget() override { kept_ = {}; }

 private:
  // Returns a buffer's memory of at least this size. Pending work must not use the memory, because
  // this function replaces memory that is too small.
  void* Reserve(Buffer* buffer, MemoryKind kind, size_t bytes) {
    if (buffer->bytes < bytes) {
      *buffer = {};
      buffer->memory = allocator_(device_, kind, bytes);
      buffer->bytes = bytes;
      current_->Set();
    }
    return buffer->memory.get();
  }

  void* Workspace() {
    const size_t bytes = static_cast<size_t>(cuda::WorkspaceBytes());
    void* const workspace = Reserve(&lane_->workspace, MemoryKind::kDevice, bytes);
    if (!lane_->has_zeros) {
      SYNCBN_CUDA_CHECK(cudaMemsetAsync(workspace, 0, cuda::kWorkspaceZeros, lane_->UseStream()));
      lane_->has_zeros = true;
    }
    return workspace;
  }

  double* NextPinned() { return Next(lane_->pinned, &pinned_used_, kPinnedVectors); }
  double* NextDevice() { return Next(lane_->device, &device_used_, kDeviceVectors); }

  // Returns the next vector of the memory that Begin has reserved.
  double* Next(const Buffer& reserved, int64_t* used, int64_t most) const {
    if (*used == most) throw DeviceError(Concat("a call must have at most ", most, " vectors"));
    return static_cast<double*>(reserved.memory.get()) + (*used)++ * channels_;
  }

  double* Pin(const double* values) {
    double* const pinned = NextPinned();
    std::copy_n(values, channels_, pinned);
    return pinned;
  }

  // Returns where the values will be on the device after the next Flush.
  const double* Upload(const double* values) {
    double* const device = NextDevice();
    queued_.push_back({Pin(values), device, channels_, true, true, false});
    return device;
  }

  void UploadInput(PassInput* input) {
    const bool reads_z = input->from_output || input->activation.function != Function::kIdentity;
    input->scale = Upload(input->scale);
    input->offset = reads_z ? Upload(input->offset) : nullptr;
    input->mean = input->from_output ? nullptr : Upload(input->mean);
  }

  void Flush() {
    if (queued_.empty()) return;
    cuda::CopyVectors(queued_, lane_->UseStream());
    queued_.clear();
  }

  // The kernel writes its results to pinned memory. Reduce copies them to the arrays of `pass`.
  void Reduce(const ReductionPass& pass,
              void (*kernel)(const ReductionPass&, void*, cudaStream_t)) {
    ReductionPass on_device = pass;
    on_device.first = NextPinned();
    on_device.second = NextPinned();
    kernel(on_device, Workspace(), lane_->UseStream());
    lane_->Synchronize();
    std::copy_n(on_device.first, channels_, pass.first);
    std::copy_n(on_device.second, channels_, pass.second);
  }

  void Close() noexcept {
    if (lane_ != nullptr) Lane::Release(device_.id, lane_);
    lane_ = nullptr;
    current_.reset();
    read_.clear();
    queued_.clear();
  }

  const Device device_;
  const Allocator allocator_;
  Buffer kept_;
  // The state of the current call:
  std::unique_ptr<CurrentDevice> current_;
  Lane* lane_ = nullptr;
  int64_t channels_ = 0;
  int64_t pinned_used_ = 0, device_used_ = 0;  // numbers of vectors
  std::map<const void*, const double*> read_;
  std::vector<cuda::VectorCopy> queued_;
};

}  // namespace

std::unique_ptr<Backend> MakeCudaBackend(const Device& device, Allocator allocator) {
  return std::make_unique<CudaBackend>(device, allocator);
}

}  // namespace syncbn
