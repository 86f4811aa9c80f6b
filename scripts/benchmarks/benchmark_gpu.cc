// Times the CUDA kernels beside plain kernels that move the same bytes. Each is first compared with
// the CPU's kernel on the same data, and timed only if it is right.
// Who uses it: benchmark_gpu.py, as `benchmark_gpu REPETITIONS`. It writes a JSON object a line:
// first the GPU's, then one for each line that it reads: N,C,H,W,DTYPE,LAYOUT for kernels, or
// forwards,DEVICES,COUNT for phase_times.cc. In between it leaves the GPU to others.
//
// Before each repetition the second-level cache is overwritten, and times are those of CUDA events.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/parallel_for.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "kernels/cuda/check.h"

namespace syncbn::cuda {
// Of plain_moves.cu.
void MovePlainly(int reads, bool writes, const void* first, const void* second, void* to,
                 int64_t bytes, cudaStream_t stream);
}  // namespace syncbn::cuda

namespace syncbn {
void TimeForwards(int devices, int count);  // of phase_times.cc
}

namespace cpu = syncbn::cpu;
namespace cuda = syncbn::cuda;
using syncbn::BackwardInput;
using syncbn::DType;
using syncbn::Layout;
using syncbn::Request;
using Bytes = std::vector<char>;
using Vector = std::vector<double>;

namespace {

constexpr double kEpsilon = 1e-5;
constexpr int kWarmUp = 3;
// Of a sum, relative to the sizes of its terms: each joins a lane of at most 136, which then joins
// as many, see sums.cuh; four times that for what is computed from sums.
constexpr double kSumError = 4 * 272 * 0x1p-24;

struct Case {
  std::string name, dtype_name, layout_name;  // "4,64,240,240", "float16", "channels-last"
  DType dtype;
  Layout layout;

  int64_t SizeInBytes() const {
    return layout.Size() * static_cast<int64_t>(syncbn::SizeOf(dtype));
  }
};

// Without an activation.
BackwardInput Plain(const Case& of, const void* x, const void* dy, const double* mean) {
  return {of.dtype, of.layout, x, dy, {}, false, mean, nullptr, nullptr};
}

Case Parse(const std::string& text) {
  std::istringstream fields(text);
  long n, c, h, w;
  char comma;
  Case parsed;
  fields >> n >> comma >> c >> comma >> h >> comma >> w >> comma;
  std::getline(fields, parsed.dtype_name, ',');
  std::getline(fields, parsed.layout_name);
  parsed.name = syncbn::Concat(n, ", ", c, ", ", h, ", ", w);
  parsed.dtype = parsed.dtype_name == "float16" ? DType::kFloat16 : DType::kFloat32;
  const bool last = parsed.layout_name == "channels-last";
  parsed.layout = last ? Layout{n * h * w, c, 1} : Layout{n, c, h * w};
  return parsed;
}

// Normal numbers about `center`, of this case's dtype.
Bytes Random(const Case& of, double center, unsigned seed) {
  constexpr int64_t kEach = 1 << 16;
  Bytes bytes(static_cast<size_t>(of.SizeInBytes()));
  const int64_t size = of.layout.Size();
  syncbn::ParallelFor((size + kEach - 1) / kEach, [&](int64_t part) {
    std::mt19937 generator(seed + static_cast<unsigned>(part));
    std::normal_distribution<float> normal(static_cast<float>(center), 1);
    for (int64_t i = part * kEach; i < std::min(size, (part + 1) * kEach); ++i) {
      const float value = normal(generator);
      if (of.dtype == DType::kFloat16) {
        reinterpret_cast<__half*>(bytes.data())[i] = __float2half_rn(value);
      } else {
        reinterpret_cast<float*>(bytes.data())[i] = value;
      }
    }
  });
  return bytes;
}

double Get(const Case& of, const Bytes& tensor, int64_t i) {
  if (of.dtype == DType::kFloat32) return reinterpret_cast<const float*>(tensor.data())[i];
  return __half2float(reinterpret_cast<const __half*>(tensor.data())[i]);
}

// Memory of the GPU; starts as NaN in every dtype.
class OnGpu {
 public:
  explicit OnGpu(size_t bytes, int fill = 0xff) : bytes_(bytes) {
    SYNCBN_CUDA_CHECK(cudaMalloc(&data_, bytes));
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(data_, fill, bytes, nullptr));
  }
  template <typename T>
  explicit OnGpu(const std::vector<T>& values) : OnGpu(values.size() * sizeof(T)) {
    SYNCBN_CUDA_CHECK(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyDefault));
  }
  OnGpu(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data_); }
  void* data() const { return data_; }
  double* vector() const { return static_cast<double*>(data_); }
  template <typename T>
  std::vector<T> Get() const {
    std::vector<T> values(bytes_ / sizeof(T));
    SYNCBN_CUDA_CHECK(cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDefault));
    return values;
  }

 private:
  void* data_ = nullptr;
  const size_t bytes_;
};

using Work = std::function<void()>;  // queues kernels

// Median seconds of `work`.
double Seconds(const Work& work, const OnGpu& flush, size_t flush_bytes, int repetitions) {
  std::vector<float> times;
  cudaEvent_t begin, end;
  SYNCBN_CUDA_CHECK(cudaEventCreate(&begin));
  SYNCBN_CUDA_CHECK(cudaEventCreate(&end));
  for (int i = 0; i < kWarmUp + repetitions; ++i) {
    // Long enough for the host to queue the rest meanwhile.
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(flush.data(), i, flush_bytes, nullptr));
    SYNCBN_CUDA_CHECK(cudaEventRecord(begin, nullptr));
    work();
    SYNCBN_CUDA_CHECK(cudaEventRecord(end, nullptr));
    SYNCBN_CUDA_CHECK(cudaEventSynchronize(end));
    float milliseconds = 0;
    SYNCBN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= kWarmUp) times.push_back(milliseconds / 1e3f);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// The results of the CPU's kernels for a case, and the coefficients that both sides take.
struct Expected {
  Expected(const Case& of, const Bytes& x, const Bytes& dy)
      : mean(channels(of)), m2(mean), sum_dy(mean), sum_dy_xmu(mean), a(mean), b(mean), d(mean),
        offset(mean), inv_std(mean), y(x.size()), dx(x.size()) {
    Bytes scratch(static_cast<size_t>(cpu::WorkspaceBytes(of.layout)));
    cpu::LocalMoments({of.dtype, of.layout, x.data(), mean.data(), m2.data()}, scratch.data());
    const double n = static_cast<double>(of.layout.PerChannel());
    const BackwardInput input = Plain(of, x.data(), dy.data(), mean.data());
    cpu::BackwardSums({input, sum_dy.data(), sum_dy_xmu.data()}, scratch.data());
    for (size_t c = 0; c < mean.size(); ++c) {
      inv_std[c] = 1 / std::sqrt(m2[c] / n + kEpsilon);
      a[c] = (0.5 + 0.01 * static_cast<double>(c % 100)) * inv_std[c];
      b[c] = -a[c] * inv_std[c] * inv_std[c] * sum_dy_xmu[c] / n;
      d[c] = -a[c] * sum_dy[c] / n;
      offset[c] = 0.25;
    }
    cpu::Normalize({of.dtype, of.layout, x.data(), mean.data(), a.data(), offset.data(), {},
                    Request::kWrite, y.data()});
    cpu::BackwardApply({input, a.data(), b.data(), d.data(), Request::kWrite, dx.data()});
  }
  static size_t channels(const Case& of) { return static_cast<size_t>(of.layout.channels); }

  Vector mean, m2, sum_dy, sum_dy_xmu, a, b, d, offset, inv_std;
  Bytes y, dx;
};

[[noreturn]] void Fail(const Case& of, const char* what, double error, double bound) {
  std::fprintf(stderr, "%s of (%s) %s %s is wrong by %g, at most %g is right\n", what,
               of.name.c_str(), of.dtype_name.c_str(), of.layout_name.c_str(), error, bound);
  std::exit(1);
}

// `unit(c)` is the size of the terms that are added up for channel c.
void CheckVector(const Case& of, const char* what, const Vector& result, const Vector& expected,
                 const std::function<double(size_t)>& unit) {
  for (size_t c = 0; c < result.size(); ++c) {
    const double error = std::fabs(result[c] - expected[c]) / unit(c);
    if (!(error <= kSumError)) Fail(of, what, error, kSumError);
  }
}

void CheckTensor(const Case& of, const char* what, const Bytes& result, const Bytes& expected) {
  const double unit = of.dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-24;
  for (int64_t i = 0; i < of.layout.Size(); ++i) {
    const double right = Get(of, expected, i), error = std::fabs(Get(of, result, i) - right);
    // Either side rounds a few terms, below 32 here, and then the result.
    const double bound = 2 * (16 * 32 * 0x1p-24 + unit * std::fabs(right));
    if (!(error <= bound)) Fail(of, what, error, bound);
  }
}

// One case's memory, kernels and check.
class Subject {
 public:
  explicit Subject(const Case& of)
      : case_(of),
        x_(Random(of, 3, 1)),
        dy_(Random(of, 0, 1u << 20)),
        expected_(of, x_, dy_),
        x_on_gpu_(x_), dy_on_gpu_(dy_),
        mean_(expected_.mean), a_(expected_.a), b_(expected_.b), d_(expected_.d),
        offset_(expected_.offset),
        y_(x_.size()), dx_(x_.size()),
        scratch_(static_cast<size_t>(cuda::WorkspaceBytes()), 0),
        results_(4 * expected_.mean.size() * sizeof(double)) {}

  void Moments() {
    cuda::LocalMoments({case_.dtype, case_.layout, x_on_gpu_.data(), Result(0), Result(1)},
                       scratch_.data(), nullptr);
  }
  void Normalize() {
    cuda::Normalize({case_.dtype, case_.layout, x_on_gpu_.data(), mean_.vector(), a_.vector(),
                     offset_.vector(), {}, Request::kWrite, y_.data()},
                    nullptr);
  }
  void Sums() {
    cuda::BackwardSums({Input(), Result(2), Result(3)}, scratch_.data(), nullptr);
  }
  void Apply() {
    cuda::BackwardApply({Input(), a_.vector(), b_.vector(), d_.vector(), Request::kWrite,
                         dx_.data()},
                        nullptr);
  }

  // As many bytes as those of a pass; the results of passes are gone then.
  void Move(int reads, bool writes) {
    cuda::MovePlainly(reads, writes, x_on_gpu_.data(), dy_on_gpu_.data(), y_.data(),
                      case_.SizeInBytes(), nullptr);
  }

  // Ends the program unless each kernel is right.
  void Verify() {
    Moments();
    Normalize();
    Sums();
    Apply();
    const Vector all = results_.Get<double>();
    const size_t channels = expected_.mean.size();
    const auto part = [&](size_t k) {
      return Vector(all.begin() + k * channels, all.begin() + (k + 1) * channels);
    };
    const double n = static_cast<double>(case_.layout.PerChannel());
    const auto std_of = [&](size_t c) { return 1 / expected_.inv_std[c]; };
    CheckVector(case_, "mean", part(0), expected_.mean, std_of);
    CheckVector(case_, "m2", part(1), expected_.m2,
                [&](size_t c) { return n * std_of(c) * std_of(c); });
    CheckVector(case_, "sum_dy", part(2), expected_.sum_dy, [&](size_t) { return n; });
    CheckVector(case_, "sum_dy_xmu", part(3), expected_.sum_dy_xmu,
                [&](size_t c) { return n * std_of(c); });
    CheckTensor(case_, "y", y_.Get<char>(), expected_.y);
    CheckTensor(case_, "dx", dx_.Get<char>(), expected_.dx);
  }

 private:
  BackwardInput Input() const {
    return Plain(case_, x_on_gpu_.data(), dy_on_gpu_.data(), mean_.vector());
  }
  double* Result(size_t k) { return results_.vector() + k * expected_.mean.size(); }

  const Case case_;
  const Bytes x_, dy_;
  const Expected expected_;
  OnGpu x_on_gpu_, dy_on_gpu_, mean_, a_, b_, d_, offset_, y_, dx_, scratch_, results_;
};

void Measure(const std::string& text, const OnGpu& flush, size_t flush_bytes, int repetitions) {
  const Case of = Parse(text);
  Subject subject(of);
  subject.Verify();
  const std::vector<std::pair<const char*, Work>> steps = {
      {"moments", [&] { subject.Moments(); }},
      {"normalize", [&] { subject.Normalize(); }},
      {"sums", [&] { subject.Sums(); }},
      {"apply", [&] { subject.Apply(); }},
      {"forward", [&] { subject.Moments(), subject.Normalize(); }},
      {"backward", [&] { subject.Sums(), subject.Apply(); }},
      {"read", [&] { subject.Move(1, false); }},
      {"copy", [&] { subject.Move(1, true); }},
      {"two_reads", [&] { subject.Move(2, false); }},
      {"two_reads_and_a_write", [&] { subject.Move(2, true); }}};
  std::printf("{\"shape\": [%s], \"dtype\": \"%s\", \"layout\": \"%s\", \"bytes\": %lld",
              of.name.c_str(), of.dtype_name.c_str(), of.layout_name.c_str(),
              static_cast<long long>(of.SizeInBytes()));
  for (const auto& step : steps) {
    const double seconds = Seconds(step.second, flush, flush_bytes, repetitions);
    std::printf(", \"%s\": %.3f", step.first, 1e6 * seconds);
  }
  std::printf("}\n");
  std::fflush(stdout);
}

void Run(int repetitions) {
  cudaDeviceProp properties;
  int l2 = 0;
  SYNCBN_CUDA_CHECK(cudaSetDevice(0));
  SYNCBN_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  SYNCBN_CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  const size_t flush_bytes = 5 * static_cast<size_t>(l2);
  const OnGpu flush(flush_bytes);
  // Larger than any cache.
  const size_t copied = 16 * static_cast<size_t>(l2);
  const OnGpu from(copied), to(copied);
  const auto copy = [&] {
    SYNCBN_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), copied, cudaMemcpyDefault, nullptr));
  };
  const double seconds = Seconds(copy, flush, flush_bytes, repetitions);
  std::printf("{\"gpu\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d, \"architectures\": "
              "\"%s\", \"copy_gb_s\": %.1f}\n",
              properties.name, cuda::Multiprocessors(), l2, cuda::Architectures(),
              2.0 * static_cast<double>(copied) / seconds / 1e9);
  std::fflush(stdout);
  for (std::string text; std::getline(std::cin, text);) {
    int devices = 0, count = 0;
    if (std::sscanf(text.c_str(), "forwards,%d,%d", &devices, &count) == 2) {
      syncbn::TimeForwards(devices, count);
    } else {
      Measure(text, flush, flush_bytes, repetitions);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    Run(count > 1 ? std::atoi(arguments[1]) : 30);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "benchmark_gpu: %s\n", error.what());
    return 1;
  }
  return 0;
}
