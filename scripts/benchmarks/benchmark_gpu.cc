// Time the four passes of the CUDA kernels beside a copy by cudaMemcpy. Each pass is timed only
// after its result has been compared with the CPU's.
//
// benchmark_gpu.py runs `benchmark_gpu REPETITIONS CASE...`, where a case is N,C,H,W,DTYPE,LAYOUT.
// Each line of the output is a JSON object: the first describes the GPU, the others one case each.
// CUDA events measure the times. Each repetition begins with overwriting the second-level cache.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/passes.h"
#include "tensor.h"

namespace cpu = syncbn::cpu;
namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using test::Tensor;
using Work = std::function<void()>;  // queues kernels

namespace {

constexpr syncbn::WriteMode kWrite = syncbn::WriteMode::kWrite;
// Bound of a sum's error, relative to its terms' sizes. A lane sums at most 136 terms, and at most
// 136 lanes are summed (sums.cuh). Results computed from sums may have four times this error.
constexpr double kSumError = 4 * 272 * 0x1p-24;

struct Format {
  DType dtype;
  Layout layout;
};

// Writes the case to stdout, as the beginning of a JSON object.
Format Parse(const char* text) {
  int n, c, h, w;
  char dtype[16], layout[16];
  if (std::sscanf(text, "%d,%d,%d,%d,%15[^,],%15s", &n, &c, &h, &w, dtype, layout) != 6) {
    throw syncbn::Error(syncbn::Concat("a case must be N,C,H,W,DTYPE,LAYOUT, got ", text));
  }
  std::printf("{\"shape\": [%d, %d, %d, %d], \"dtype\": \"%s\", \"layout\": \"%s\"", n, c, h, w,
              dtype, layout);
  const bool half = dtype == std::string("float16"), last = layout == std::string("channels-last");
  const int64_t rows = n, inner = static_cast<int64_t>(h) * w;
  return {half ? DType::kFloat16 : DType::kFloat32,
          last ? Layout{rows * inner, c, 1} : Layout{rows, c, inner}};
}

// Normal numbers around `center`, repeated after a prime number of elements.
Tensor Random(const Format& format, double center, unsigned seed) {
  Tensor some(format.dtype, 65521), all(format.dtype, format.layout.Size());
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(center, 1);
  for (int64_t i = 0; i < some.size(); ++i) some.Set(i, normal(generator));
  const std::string bits = some.Bytes();
  char* const to = static_cast<char*>(all.data());
  const int64_t width = static_cast<int64_t>(syncbn::SizeOf(format.dtype));
  for (int64_t i = 0; i < all.size(); ++i) {
    std::memcpy(to + i * width, bits.data() + i % some.size() * width, width);
  }
  return all;
}

void Copy(void* to, const void* from, size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

// GPU memory whose bytes are all `fill`. The fill 0xff is NaN in every dtype.
struct OnGpu {
  OnGpu(size_t size, int fill) : bytes(size) {
    SYNCBN_CUDA_CHECK(cudaMalloc(&data, bytes));
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(data, fill, bytes, nullptr));
  }
  explicit OnGpu(Tensor* tensor) : OnGpu(tensor->Bytes().size(), 0) {
    Copy(data, tensor->data(), bytes);
  }
  OnGpu(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data); }

  void* data = nullptr;
  const size_t bytes;
};

// The arrays of one side, CPU or GPU. `read` contains mean, a, b, d and offset, one after the
// other, and `written` contains mean, m2, sum_dy and sum_dy_xmu.
struct Side {
  const Format& format;
  void *x, *dy, *y, *dx, *read, *written;

  double* Read(int k) const { return static_cast<double*>(read) + k * format.layout.channels; }
  double* Written(int k) const {
    return static_cast<double*>(written) + k * format.layout.channels;
  }
  syncbn::PassInput Input() const {
    return {format.dtype, format.layout, x, dy, {}, false, Read(0), Read(1), Read(4)};
  }
  syncbn::ReductionPass Moments() const { return {Input(), Written(0), Written(1)}; }
  syncbn::ElementwisePass Normalize() const { return {Input(), nullptr, nullptr, kWrite, y}; }
  syncbn::ReductionPass Sums() const { return {Input(), Written(2), Written(3)}; }
  syncbn::ElementwisePass Apply() const { return {Input(), Read(2), Read(3), kWrite, dx}; }
};

// Runs the CPU's passes and fills `read`, which both sides share.
void RunOnCpu(const Side& side) {
  const Layout& layout = side.format.layout;
  cpu::LocalMoments(side.Moments());
  std::copy_n(side.Written(0), layout.channels, side.Read(0));
  cpu::BackwardSums(side.Sums());
  const double n = static_cast<double>(layout.PerChannel());
  for (int64_t c = 0; c < layout.channels; ++c) {
    const double a = side.Read(1)[c] = 0.5 + 0.01 * static_cast<double>(c % 100);
    side.Read(2)[c] = -a * side.Written(3)[c] / n;
    side.Read(3)[c] = -a * side.Written(2)[c] / n;
    side.Read(4)[c] = 0.25;
  }
  cpu::Normalize(side.Normalize());
  cpu::BackwardApply(side.Apply());
}

// Throws if the error of an element i exceeds `bound(i, right value)`.
template <typename Bound>
void Compare(const char* what, const OnGpu& on_gpu, const Tensor& right, const Bound& bound) {
  Tensor result = right;
  Copy(result.data(), on_gpu.data, on_gpu.bytes);
  for (int64_t i = 0; i < right.size(); ++i) {
    const double error = std::fabs(result.Get(i) - right.Get(i));
    const double most = bound(i, right.Get(i));
    if (error <= most) continue;
    throw syncbn::Error(
        syncbn::Concat("the error of ", what, " must be at most ", most, ", got ", error));
  }
}

double MedianMicroseconds(const Work& work, const OnGpu& flush, int repetitions) {
  std::vector<float> times;
  cudaEvent_t begin, end;
  SYNCBN_CUDA_CHECK(cudaEventCreate(&begin));
  SYNCBN_CUDA_CHECK(cudaEventCreate(&end));
  for (int i = -3; i < repetitions; ++i) {  // three to warm up
    // It takes long enough for the host to queue the rest meanwhile.
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(flush.data, i, flush.bytes, nullptr));
    SYNCBN_CUDA_CHECK(cudaEventRecord(begin, nullptr));
    work();
    SYNCBN_CUDA_CHECK(cudaEventRecord(end, nullptr));
    SYNCBN_CUDA_CHECK(cudaEventSynchronize(end));
    float milliseconds = 0;
    SYNCBN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= 0) times.push_back(1e3f * milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

void Measure(const Format& format, const OnGpu& flush, int repetitions) {
  const int64_t channels = format.layout.channels;
  Tensor x = Random(format, 3, 1), dy = Random(format, 0, 2), y(format.dtype, x.size()), dx = y;
  Tensor read(DType::kFloat64, 5 * channels), written(DType::kFloat64, 4 * channels);
  RunOnCpu({format, x.data(), dy.data(), y.data(), dx.data(), read.data(), written.data()});
  const OnGpu gpu_x(&x), gpu_dy(&dy), gpu_y(gpu_x.bytes, 0xff), gpu_dx(gpu_x.bytes, 0xff);
  const OnGpu gpu_read(&read), gpu_written(written.Bytes().size(), 0xff);
  const OnGpu scratch(static_cast<size_t>(cuda::WorkspaceBytes()), 0);
  const Side gpu{format,      gpu_x.data,    gpu_dy.data,     gpu_y.data,
                 gpu_dx.data, gpu_read.data, gpu_written.data};
  const std::pair<const char*, Work> steps[] = {
      {"moments", [&] { cuda::LocalMoments(gpu.Moments(), scratch.data, nullptr); }},
      {"normalize", [&] { cuda::Normalize(gpu.Normalize(), nullptr); }},
      {"sums", [&] { cuda::BackwardSums(gpu.Sums(), scratch.data, nullptr); }},
      {"apply", [&] { cuda::BackwardApply(gpu.Apply(), nullptr); }},
      {"all",
       [&] {
         for (int k = 0; k < 4; ++k) steps[k].second();
       }},
      {"copy", [&] { Copy(gpu.y, gpu.x, gpu_x.bytes); }}};
  steps[4].second();
  // Terms have a size of about 1, the standard deviation of x and dy.
  const double terms = static_cast<double>(format.layout.PerChannel());
  Compare("a mean or sum", gpu_written, written,
          [&](int64_t i, double) { return kSumError * (i < channels ? 1 : terms); });
  // Either side rounds a few terms, which are below 32 here, and then the result.
  const double unit = format.dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-23;
  const auto rounding = [&](int64_t, double value) { return 0x1p-14 + unit * std::fabs(value); };
  Compare("y", gpu_y, y, rounding);
  Compare("dx", gpu_dx, dx, rounding);
  for (const auto& step : steps) {
    const double median = MedianMicroseconds(step.second, flush, repetitions);
    std::printf(", \"%s\": %.3f", step.first, median);
  }
  std::printf("}\n");
}

}  // namespace

int main(int, char** arguments) {
  cudaDeviceProp properties;
  int l2 = 0;
  SYNCBN_CUDA_CHECK(cudaSetDevice(0));
  SYNCBN_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  SYNCBN_CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  std::printf("{\"gpu\": \"%s\", \"l2_bytes\": %d}\n", properties.name, l2);
  const OnGpu flush(5 * static_cast<size_t>(l2), 0);
  for (char** text = arguments + 2; *text != nullptr; ++text) {
    Measure(Parse(*text), flush, std::atoi(arguments[1]));
  }
}
