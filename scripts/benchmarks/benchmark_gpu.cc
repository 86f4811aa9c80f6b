// Times the four passes of the CUDA kernels, and a copy of a tensor by cudaMemcpy, in turns. Before
// a layout is timed, kernel_tests.h verifies the passes on a tensor of the same layout and dtype.
//
//     benchmark_gpu large    prints JSON for scripts/results/benchmark_gpu.json
//     benchmark_gpu small    prints the same for small tensors, to try the program in emulation
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "kernel_tests.h"
#include "managed.h"

namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using syncbn::WriteMode;
using test::Check;

namespace {

// GPU memory full of zeros. The time of a pass does not depend on values.
struct Zeros {
  explicit Zeros(int64_t size) : bytes(static_cast<size_t>(size)) {
    Check(cudaMalloc(&data, bytes));
    Check(cudaMemsetAsync(data, 0, bytes, nullptr));
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
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  for (int i = -3; i < repetitions; ++i) {  // three to warm up
    for (Timed& pass : passes) {
      // The host queues the pass while the GPU writes.
      Check(cudaMemsetAsync(flush.data, i, flush.bytes, nullptr));
      Check(cudaEventRecord(begin, nullptr));
      pass.queue();
      Check(cudaEventRecord(end, nullptr));
      Check(cudaEventSynchronize(end));
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begin, end));
      if (i >= 0) pass.milliseconds.push_back(milliseconds);
    }
  }
}

// Prints a JSON object for each pass. Its bandwidth is relative to the bandwidth of the copy.
void Measure(DType dtype, const Layout& layout, int repetitions, const Zeros& flush) {
  test::TestCase<test::CudaKernels>({dtype, layout, 0, 3, 1}, {});
  if (check::Result() != 0) std::exit(1);
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
      {"copy", 2, [&] { Check(cudaMemcpy(y.data, x.data, x.bytes, cudaMemcpyDefault)); }}};
  TakeTurns(passes, repetitions, flush);
  const double copy_of_one = Median(passes.back().milliseconds) / passes.back().tensors;
  for (const Timed& pass : passes) {
    const double milliseconds = Median(pass.milliseconds);
    static const char* separator = "\n  ";
    std::cout << separator << "{\"layout\": \"" << test::Describe(layout) << "\", \"dtype\": \""
              << syncbn::Name(dtype) << "\", \"pass\": \"" << pass.name
              << "\", \"microseconds\": " << 1e3 * milliseconds
              << ", \"bandwidth\": " << pass.tensors * copy_of_one / milliseconds << "}"
              << std::flush;
    separator = ",\n  ";
  }
}

}  // namespace

int main(int arguments, char** values) {
  const bool is_large = arguments > 1 && values[1] == std::string("large");
  // Each tensor is measured with its channels first (NCHW), and then last (NHWC).
  const std::vector<Layout> small = {{2, 8, 36}, {72, 8, 1}};
  // The first four are layouts of tensors in a dilated ResNet-50 for 4 images of 480 x 480 pixels.
  const std::vector<Layout> large = {{4, 64, 57600},   {230400, 64, 1}, {4, 1024, 3600},
                                     {14400, 1024, 1}, {4, 512, 36},    {144, 512, 1},
                                     {64, 2048, 49},   {3136, 2048, 1}};
  cudaDeviceProp properties;
  int l2 = 0;
  test::UseManagedMemory();
  Check(cudaGetDeviceProperties(&properties, 0));
  Check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  const Zeros flush(5 * static_cast<int64_t>(l2));
  std::cout << "{\"gpu\": \"" << properties.name << "\",\n \"rows\": [";
  for (const Layout& layout : is_large ? large : small) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16})
      Measure(dtype, layout, is_large ? 30 : 2, flush);
  }
  std::cout << "\n ]\n}" << std::endl;
}
