// Times the four passes of the CUDA kernels beside a copy by cudaMemcpy. Each is first compared
// with the CPU's on the same data, and timed only if it is right.
// Run by benchmark_gpu.py as `benchmark_gpu REPETITIONS CASE...`, a case being
// N,C,H,W,DTYPE,LAYOUT. It writes a JSON object a line: first the GPU's, then one for each case.
//
// Before each repetition the second-level cache is overwritten, and times are those of CUDA events.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/passes.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/check.h"
#include "tensor.h"

namespace cpu = syncbn::cpu;
namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using test::Tensor;
using Work = std::function<void()>;  // queues kernels

namespace {

constexpr syncbn::WriteMode kWrite = syncbn::WriteMode::kWrite;
// Of a sum, relative to the sizes of its terms: each joins a lane of at most 136, which then joins
// as many, see sums.cuh; four times that for what is computed from sums.
constexpr double kSumError = 4 * 272 * 0x1p-24;

struct Case {
  DType dtype;
  Layout layout;
};

// Writes the case to stdout, as the beginning of a JSON object.
Case Parse(const char* text) {
  int n, c, h, w;
  char dtype[16], layout[16];
  if (std::sscanf(text, "%d,%d,%d,%d,%15[^,],%15s", &n, &c, &h, &w, dtype, layout) != 6) {
    throw syncbn::Error(syncbn::Concat("a case is ", text, ", not N,C,H,W,DTYPE,LAYOUT"));
  }
  std::printf("{\"shape\": [%d, %d, %d, %d], \"dtype\": \"%s\", \"layout\": \"%s\"", n, c, h, w,
              dtype, layout);
  const bool half = dtype == std::string("float16"), last = layout == std::string("channels-last");
  const int64_t rows = n, inner = static_cast<int64_t>(h) * w;
  return {half ? DType::kFloat16 : DType::kFloat32,
          last ? Layout{rows * inner, c, 1} : Layout{rows, c, inner}};
}

// Normal numbers about `center`, which repeat after a prime number of elements.
Tensor Random(const Case& of, double center, unsigned seed) {
  Tensor some(of.dtype, 65521), all(of.dtype, of.layout.Size());
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(center, 1);
  for (int64_t i = 0; i < some.size(); ++i) some.Set(i, normal(generator));
  const std::string bits = some.Bits();
  char* const to = static_cast<char*>(all.data());
  const int64_t width = static_cast<int64_t>(syncbn::SizeOf(of.dtype));
  for (int64_t i = 0; i < all.size(); ++i) {
    std::memcpy(to + i * width, bits.data() + i % some.size() * width, width);
  }
  return all;
}

void Copy(void* to, const void* from, size_t bytes) {
  SYNCBN_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

// Memory of the GPU, each byte of which is `fill`; NaN in every dtype if that is 0xff.
struct OnGpu {
  OnGpu(size_t size, int fill) : bytes(size) {
    SYNCBN_CUDA_CHECK(cudaMalloc(&data, bytes));
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(data, fill, bytes, nullptr));
  }
  explicit OnGpu(Tensor* tensor) : OnGpu(tensor->Bits().size(), 0) {
    Copy(data, tensor->data(), bytes);
  }
  OnGpu(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data); }

  void* data = nullptr;
  const size_t bytes;
};

// The arrays of one side, CPU or GPU. Passes read mean, a, b, d and offset, one after the other,
// and write mean, m2, sum_dy and sum_dy_xmu.
struct Side {
  const Case& of;
  void *x, *dy, *y, *dx, *read, *written;

  double* Read(int k) const { return static_cast<double*>(read) + k * of.layout.channels; }
  double* Written(int k) const { return static_cast<double*>(written) + k * of.layout.channels; }
  syncbn::PassInput Input() const {
    return {of.dtype, of.layout, x, dy, {}, false, Read(0), Read(1), Read(4)};
  }
  syncbn::ReductionPass Moments() const { return {Input(), Written(0), Written(1)}; }
  syncbn::ElementwisePass Normalize() const { return {Input(), nullptr, nullptr, kWrite, y}; }
  syncbn::ReductionPass Sums() const { return {Input(), Written(2), Written(3)}; }
  syncbn::ElementwisePass Apply() const { return {Input(), Read(2), Read(3), kWrite, dx}; }
};

// The CPU's passes, and what both sides read.
void RunOnCpu(const Side& side) {
  const Layout& layout = side.of.layout;
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

// `bound(i, value)` is the largest error that element i may have, whose right value this is.
template <typename Bound>
void Compare(const char* what, const OnGpu& on_gpu, const Tensor& right, const Bound& bound) {
  Tensor result = right;
  Copy(result.data(), on_gpu.data, on_gpu.bytes);
  for (int64_t i = 0; i < right.size(); ++i) {
    const double error = std::fabs(result.Get(i) - right.Get(i));
    const double most = bound(i, right.Get(i));
    if (error <= most) continue;
    throw syncbn::Error(syncbn::Concat(what, " is wrong by ", error, ", expected ", most));
  }
}

// Median microseconds of `work`.
double Microseconds(const Work& work, const OnGpu& flush, int repetitions) {
  std::vector<float> times;
  cudaEvent_t begin, end;
  SYNCBN_CUDA_CHECK(cudaEventCreate(&begin));
  SYNCBN_CUDA_CHECK(cudaEventCreate(&end));
  for (int i = -3; i < repetitions; ++i) {  // three to warm up
    // Long enough for the host to queue the rest meanwhile.
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

void Measure(const Case& of, const OnGpu& flush, int repetitions) {
  const int64_t channels = of.layout.channels;
  Tensor x = Random(of, 3, 1), dy = Random(of, 0, 2), y(of.dtype, x.size()), dx = y;
  Tensor read(DType::kFloat64, 5 * channels), written(DType::kFloat64, 4 * channels);
  RunOnCpu({of, x.data(), dy.data(), y.data(), dx.data(), read.data(), written.data()});
  const OnGpu gpu_x(&x), gpu_dy(&dy), gpu_y(gpu_x.bytes, 0xff), gpu_dx(gpu_x.bytes, 0xff);
  const OnGpu gpu_read(&read), gpu_written(written.Bits().size(), 0xff);
  const OnGpu scratch(static_cast<size_t>(cuda::WorkspaceBytes()), 0);
  const Side gpu{of,          gpu_x.data,    gpu_dy.data,     gpu_y.data,
                 gpu_dx.data, gpu_read.data, gpu_written.data};
  const std::pair<const char*, Work> steps[] = {
      {"moments", [&] { cuda::LocalMoments(gpu.Moments(), scratch.data, nullptr); }},
      {"normalize", [&] { cuda::Normalize(gpu.Normalize(), nullptr); }},
      {"sums", [&] { cuda::BackwardSums(gpu.Sums(), scratch.data, nullptr); }},
      {"apply", [&] { cuda::BackwardApply(gpu.Apply(), nullptr); }},
      {"all", [&] { for (int k = 0; k < 4; ++k) steps[k].second(); }},
      {"copy", [&] { Copy(gpu.y, gpu.x, gpu_x.bytes); }}};
  steps[4].second();
  // Terms are about as large as 1, the deviation of x and dy.
  const double terms = static_cast<double>(of.layout.PerChannel());
  Compare("a mean or sum", gpu_written, written,
          [&](int64_t i, double) { return kSumError * (i < channels ? 1 : terms); });
  // Either side rounds a few terms, below 32 here, and then the result.
  const double unit = of.dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-23;
  const auto rounding = [&](int64_t, double value) { return 0x1p-14 + unit * std::fabs(value); };
  Compare("y", gpu_y, y, rounding);
  Compare("dx", gpu_dx, dx, rounding);
  for (const auto& step : steps) {
    std::printf(", \"%s\": %.3f", step.first, Microseconds(step.second, flush, repetitions));
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
