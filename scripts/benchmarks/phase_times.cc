// Times forwards of a small layer from the host, part by part: the costs of a call beside its
// kernels. Its devices are threads, all on one GPU.
// Who uses it: benchmark_gpu.cc. It must not know kernels.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"
#include "op/sync_batch_norm.h"

namespace syncbn {
namespace {

using Clock = std::chrono::steady_clock;

// The parts of a forward, in their order. Moments end when the host has them, and finish when y is
// written; in between the devices exchange moments, and compute coefficients.
constexpr const char* kParts[] = {"begin", "moments", "rendezvous", "normalize", "finish"};
constexpr size_t kPartCount = std::size(kParts);
constexpr int64_t kRows = 2, kChannels = 64, kInner = 64;

// The seconds of each part in every forward.
using Times = std::array<std::vector<double>, kPartCount>;

// Hands every call on to the backend of a GPU, and notes when those of a forward are over.
class TimedBackend : public Backend {
 public:
  TimedBackend(std::unique_ptr<Backend> backend, Times* times)
      : backend_(std::move(backend)), times_(*times) {}

  void Begin(const Layout& layout, const std::vector<const Tensor*>& vectors) override {
    last_ = Clock::now();
    backend_->Begin(layout, vectors);
    End(0);
  }
  void LocalMoments(const MomentsPass& pass) override {
    backend_->LocalMoments(pass);
    End(1);
  }
  void Normalize(const NormalizePass& pass) override {
    End(2);
    backend_->Normalize(pass);
    End(3);
  }
  void Finish() override {
    backend_->Finish();
    End(4);
  }
  void Abandon() noexcept override { backend_->Abandon(); }

  std::vector<double> Read(const Tensor& vector) override { return backend_->Read(vector); }
  void Write(const std::vector<double>& values, Request request, const Tensor& vector) override {
    backend_->Write(values, request, vector);
  }
  bool Predict(NormalizePass pass, const Prediction& by) override {
    return backend_->Predict(pass, by);
  }
  void BackwardSums(const SumsPass& pass) override { backend_->BackwardSums(pass); }
  void BackwardApply(const ApplyPass& pass) override { backend_->BackwardApply(pass); }
  const void* Keep(const void* tensor, size_t bytes) override {
    return backend_->Keep(tensor, bytes);
  }
  void Forget() override { backend_->Forget(); }

 private:
  void End(size_t part) {
    const Clock::time_point now = Clock::now();
    times_[part].push_back(std::chrono::duration<double>(now - last_).count());
    last_ = now;
  }

  const std::unique_ptr<Backend> backend_;
  Times& times_;
  Clock::time_point last_;
};

// Memory that lasts until the process ends.
std::shared_ptr<void> Allocate(const Device&, MemoryKind kind, size_t bytes) {
  void* memory = nullptr;
  if (kind == MemoryKind::kPinned) {
    SYNCBN_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
  } else {
    SYNCBN_CUDA_CHECK(cudaMalloc(&memory, bytes));
  }
  return std::shared_ptr<void>(memory, [](void*) {});
}

Tensor OnGpu(const std::vector<float>& values, std::vector<int64_t> shape) {
  const size_t bytes = values.size() * sizeof(float);
  const Tensor tensor{Allocate({}, MemoryKind::kDevice, bytes).get(), std::move(shape)};
  SYNCBN_CUDA_CHECK(cudaMemcpy(tensor.data, values.data(), bytes, cudaMemcpyDefault));
  return tensor;
}

// The work of one device. Returns its y.
std::vector<float> Forwards(int device, int devices, int count, std::shared_ptr<Layer> shared,
                            Times* times) {
  SYNCBN_CUDA_CHECK(cudaSetDevice(0));
  Options options;
  options.num_devices = devices;
  SyncBatchNorm layer(options, {"gpu", device}, std::move(shared),
                      std::make_unique<TimedBackend>(MakeCudaBackend({"gpu", 0}, Allocate), times));
  std::vector<float> values(kRows * kChannels * kInner);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(device) + static_cast<float>(i * 37 % 101) / 10;
  }
  const std::vector<float> ones(kChannels, 1), zeros(kChannels, 0);
  const auto vector = [](const std::vector<float>& of) { return OnGpu(of, {kChannels}); };
  const Tensor x = OnGpu(values, {kRows, kChannels, 8, 8}), y = OnGpu(values, x.shape);
  const ForwardTensors tensors{x, vector(ones), vector(zeros), Request::kWrite, y, vector(zeros),
                               vector(ones)};
  for (int i = 0; i < count; ++i) layer.Forward(true, tensors);
  SYNCBN_CUDA_CHECK(cudaMemcpy(values.data(), y.data, values.size() * sizeof(float),
                               cudaMemcpyDefault));
  return values;
}

// The outputs of all devices together have mean 0 and variance 1.
void Check(const std::vector<std::vector<float>>& outputs) {
  double sum = 0, squares = 0, count = 0;
  for (const std::vector<float>& y : outputs) {
    for (const double value : y) {
      sum += value;
      squares += value * value;
    }
    count += static_cast<double>(y.size());
  }
  if (std::fabs(sum) <= 1e-4 * count && std::fabs(squares - count) <= 1e-3 * count) return;
  throw Error(Concat("forwards on ", outputs.size(), " devices are wrong: a mean of ", sum / count,
                     " and a mean square of ", squares / count));
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

// Writes the median microseconds of each part, of `count` forwards on each of the devices.
void TimeForwards(int devices, int count) {
  const auto shared = std::make_shared<Layer>("phases");
  std::vector<Times> times(static_cast<size_t>(devices));
  std::vector<std::future<std::vector<float>>> running;
  for (int device = 0; device < devices; ++device) {
    Times* const own = &times[static_cast<size_t>(device)];
    running.push_back(std::async(std::launch::async,
                                 [=] { return Forwards(device, devices, count, shared, own); }));
  }
  std::vector<std::vector<float>> outputs;
  for (auto& result : running) outputs.push_back(result.get());
  Check(outputs);
  std::printf("{\"devices\": %d, \"forwards\": %d", devices, count);
  for (size_t part = 0; part < kPartCount; ++part) {
    std::vector<double> all;
    for (const Times& own : times) all.insert(all.end(), own[part].begin(), own[part].end());
    std::printf(", \"%s\": %.2f", kParts[part], 1e6 * Median(all));
  }
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace syncbn
