// Times the four passes of the CUDA kernels, and a copy of a tensor by cudaMemcpy, in turns. Prints
// a JSON object in each line: first the GPU, then a row for each pass of each layout and dtype.
// `bandwidth` is relative to the copy. `verified` says whether the passes of a smaller tensor,
// which is cut in the same way, passed the tests of kernel_tests.h.
//
//     benchmark_gpu large    the shapes of segmentation
//     benchmark_gpu small    small tensors, to try the program in emulation
#include <algorithm>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "kernel_tests.h"
#include "kernels/cuda/check.h"
#include "managed.h"

namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using syncbn::WriteMode;

namespace {

// GPU memory full of zeros. The time of a pass does not depend on values.
struct Zeros {
  explicit Zeros(int64_t size) : bytes(static_cast<size_t>(size)) {
    SYNCBN_CUDA_CHECK(cudaMalloc(&data, bytes));
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, nullptr));
  }
  Zeros(const Zeros&) = delete;
  ~Zeros() { cudaFree(data); }
  double* doubles() const { return static_cast<double*>(data); }

  void* data = nullptr;
  const size_t bytes;
};

struct Timed {
  const char* name;
  int tensors;  // read or written
  std::function<void()> queue;
  std::vector<float> milliseconds = {};
};

double Median(std::vector<float> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Writes to `flush` before each pass, so that no tensor is in the second-level cache.
void TakeTurns(std::vector<Timed>& passes, int repetitions, const Zeros& flush) {
  cudaEvent_t begin, end;
  SYNCBN_CUDA_CHECK(cudaEventCreate(&begin));
  SYNCBN_CUDA_CHECK(cudaEventCreate(&end));
  for (int i = -3; i < repetitions; ++i) {  // three to warm up
    for (Timed& pass : passes) {
      // The host queues the pass while the GPU writes.
      SYNCBN_CUDA_CHECK(cudaMemsetAsync(flush.data, i, flush.bytes, nullptr));
      SYNCBN_CUDA_CHECK(cudaEventRecord(begin, nullptr));
      pass.queue();
      SYNCBN_CUDA_CHECK(cudaEventRecord(end, nullptr));
      SYNCBN_CUDA_CHECK(cudaEventSynchronize(end));
      float milliseconds = 0;
      SYNCBN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
      if (i >= 0) pass.milliseconds.push_back(milliseconds);
    }
  }
}

// Returns a layout that is cut in the same way, and for which the CPU needs less than a second.
Layout Smaller(const Layout& layout) {
  if (layout.inner == 1) return {std::min<int64_t>(layout.outer, 500), layout.channels, 1};
  const int64_t outer = std::clamp<int64_t>(100000 / layout.inner, 1, 3);
  return {outer, std::min<int64_t>(layout.channels, layout.inner < 128 ? 64 : 2), layout.inner};
}

// Prints a row for each pass.
void Measure(DType dtype, const Layout& layout, int repetitions, const Zeros& flush) {
  const int failures = check::failures;
  test::TestCase<test::CudaKernels>({dtype, Smaller(layout), 0, 3, 1}, {});
  const bool verified = check::failures == failures;
  const int64_t bytes = layout.Size() * static_cast<int64_t>(syncbn::SizeOf(dtype));
  const int64_t channel_bytes = layout.channels * static_cast<int64_t>(sizeof(double));
  const Zeros x(bytes), dy(bytes), y(bytes), dx(bytes), scratch(cuda::WorkspaceBytes());
  const Zeros vector(channel_bytes), first(channel_bytes), second(channel_bytes);
  const double* const c = vector.doubles();
  const syncbn::PassInput input{dtype, layout, x.data, dy.data, {}, false, c, c, c};
  const syncbn::ReductionPass reduction{input, first.doubles(), second.doubles()};
  const syncbn::ElementwisePass normalize{input, nullptr, nullptr, WriteMode::kWrite, y.data};
  const syncbn::ElementwisePass apply{input, c, c, WriteMode::kWrite, dx.data};
  std::vector<Timed> passes = {
      {"moments", 1, [&] { cuda::LocalMoments(reduction, scratch.data, nullptr); }},
      {"normalize", 2, [&] { cuda::Normalize(normalize, nullptr); }},
      {"sums", 2, [&] { cuda::BackwardSums(reduction, scratch.data, nullptr); }},
      {"apply", 3, [&] { cuda::BackwardApply(apply, nullptr); }},
      {"copy", 2,
       [&] { SYNCBN_CUDA_CHECK(cudaMemcpy(y.data, x.data, x.bytes, cudaMemcpyDefault)); }}};
  TakeTurns(passes, repetitions, flush);
  const double copy_of_one = Median(passes.back().milliseconds) / passes.back().tensors;
  for (const Timed& pass : passes) {
    const double milliseconds = Median(pass.milliseconds);
    std::cout << "{\"shape\": [" << layout.outer << ", " << layout.channels << ", " << layout.inner
              << "], \"dtype\": \"" << syncbn::Name(dtype) << "\", \"pass\": \"" << pass.name
              << "\", \"microseconds\": " << 1e3 * milliseconds << ", \"gigabytes_per_second\": "
              << 1e-6 * static_cast<double>(pass.tensors * bytes) / milliseconds
              << ", \"bandwidth\": " << pass.tensors * copy_of_one / milliseconds
              << ", \"verified\": " << (verified ? "true" : "false") << "}" << std::endl;
  }
}

}  // namespace

int main(int arguments, char** values) {
  const bool is_large = arguments > 1 && values[1] == std::string("large");
  // The planes of 15, 33, 65 and 129 pixels a side are no whole vectors. Channels are last where
  // `inner` is 1.
  const std::vector<Layout> small = {{2, 8, 36}, {72, 8, 1}, {1, 2, 225}};
  const std::vector<Layout> large = {
      {8, 256, 3600}, {28800, 256, 1}, {2, 64, 524288}, {1048576, 64, 1}, {16, 2048, 49},
      {784, 2048, 1}, {16, 512, 225},  {3600, 512, 1},  {8, 512, 1089},   {8712, 512, 1},
      {8, 256, 4225}, {33800, 256, 1}, {4, 256, 16641}, {66564, 256, 1}};
  cudaDeviceProp properties;
  int l2 = 0;
  test::UseManagedMemory();
  SYNCBN_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  SYNCBN_CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  const Zeros flush(5 * static_cast<int64_t>(l2));
  std::cout << "{\"gpu\": \"" << properties.name << "\"}" << std::endl;
  for (const Layout& layout : is_large ? large : small) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kFloat64})
      Measure(dtype, layout, is_large ? 20 : 2, flush);
  }
  return check::Result();
}
