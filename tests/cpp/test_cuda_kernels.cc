// The CUDA kernels, see kernel_tests.h: on the CPU, see emulated_cuda/cuda_runtime.h, their logic,
// and for scripts/check_gpu.sh the kernels themselves on a GPU. With an argument it takes only some
// of the layouts, enough to start every kernel.
#include "channel_tests.h"
#include "kernel_tests.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "kernels/cuda/channels.h"
#include "kernels/cuda/partition.h"
#include "staging.h"

namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using test::Staging;

namespace {

struct CudaKernels {
  static constexpr int64_t kWorkspaceZeros = cuda::kWorkspaceZeros;
  static constexpr auto WorkspaceBytes = cuda::WorkspaceBytes;
  // A term is added to its lane, with its lane to the thread's total, and in double from there.
  static double SumError(DType dtype, double n) {
    const double eps = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
    const double lane = 8 * cuda::kFoldEvery + 8;
    return eps * std::min(n, lane + n / lane) + 0x1p-53 * n;
  }
  static double SumEps(DType dtype) { return test::EpsOf(dtype); }
  static void LocalMoments(const syncbn::MomentsPass& pass, void* workspace) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::LocalMoments({pass.dtype, pass.layout, on_gpu.In(pass.x), on_gpu.Result(pass.mean),
                        on_gpu.Result(pass.m2)},
                       Scratch(&on_gpu, pass, workspace), nullptr);
  }
  static void BackwardSums(const syncbn::SumsPass& pass, void* workspace) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::BackwardSums({Staged(&on_gpu, pass), on_gpu.Result(pass.sum_dz),
                        on_gpu.Result(pass.sum_dz_u)},
                       Scratch(&on_gpu, pass, workspace), nullptr);
  }
  static void Normalize(const syncbn::NormalizePass& pass) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::Normalize({pass.dtype, pass.layout, on_gpu.In(pass.x), on_gpu.Vector(pass.mean),
                     on_gpu.Vector(pass.scale), on_gpu.Vector(pass.offset), pass.activation,
                     pass.request, on_gpu.Out(pass.y)},
                    nullptr);
  }
  static void BackwardApply(const syncbn::ApplyPass& pass) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::BackwardApply({Staged(&on_gpu, pass), on_gpu.Vector(pass.a), on_gpu.Vector(pass.b),
                         on_gpu.Vector(pass.d), pass.request, on_gpu.Out(pass.dx)},
                        nullptr);
  }
  static void Gather(DType dtype, const void* tensor, const Layout& layout,
                     const std::vector<int64_t>& channels, void* compact) {
    const std::vector<double> numbers(channels.begin(), channels.end());
    const int64_t count = static_cast<int64_t>(numbers.size());
    Staging on_gpu(dtype, layout);
    cuda::GatherChannels(dtype, on_gpu.In(tensor), layout,
                         {on_gpu.Vector(numbers.data(), count), count},
                         on_gpu.Out(compact, {layout.outer, count, layout.inner}), nullptr);
  }
  static void Scatter(DType dtype, const void* compact, const Layout& layout,
                      const std::vector<int64_t>& channels, void* tensor) {
    const std::vector<double> numbers(channels.begin(), channels.end());
    const int64_t count = static_cast<int64_t>(numbers.size());
    Staging on_gpu(dtype, layout);
    cuda::ScatterChannels(dtype, on_gpu.In(compact, {layout.outer, count, layout.inner}), layout,
                          {on_gpu.Vector(numbers.data(), count), count}, on_gpu.Out(tensor),
                          nullptr);
  }

 private:
  template <typename Pass>
  static void* Scratch(Staging* on_gpu, const Pass& pass, void* workspace) {
    return on_gpu->Workspace(workspace, cuda::WorkspaceBytes(pass.dtype, pass.layout));
  }
  static syncbn::BackwardInput Staged(Staging* on_gpu, syncbn::BackwardInput input) {
    input.t = on_gpu->In(input.t);
    input.dy = on_gpu->In(input.dy);
    for (const double** vector : {&input.mean, &input.scale, &input.offset}) {
      *vector = on_gpu->Vector(*vector);
    }
    return input;
  }
};

// A thread's first value may be far from all others: no other thread, and no other channel, is to
// suffer, whatever float32 could hold about that value.
void TestOutlier() {
  for (const Layout& layout : {Layout{8, 2, 20000}, Layout{60000, 4, 1}}) {
    test::Problem p({DType::kFloat32, layout, 0, 1e4, 1});
    for (int64_t c = 0; c < layout.channels; ++c) p.x.Set(c * layout.inner, 0);
    std::vector<double> workspace = test::Workspace<CudaKernels>(DType::kFloat32, layout);
    std::vector<double> mean(layout.channels), m2(layout.channels);
    CudaKernels::LocalMoments({DType::kFloat32, layout, p.x.data(), mean.data(), m2.data()},
                              workspace.data());
    for (int64_t c = 0; c < layout.channels; ++c) {
      const test::Moments e = p.ExpectedMoments(c);
      CHECK_NEAR(mean[c], e.mean, 1e-6, p.label);
      CHECK_NEAR(m2[c], e.m2, 1e-4 * static_cast<double>(e.m2), p.label);
    }
  }
}

}  // namespace

int main(int arguments, char** /*values*/) {
  test::Check(cudaSetDevice(0));
  std::vector<Layout> layouts = {
      {3, 5, 7},      {2, 3, 64},    {9000, 8, 1},  {4, 6, 1023}, {5, 48, 196}, {3, 16, 225}};
  const std::vector<Layout> more = {
      {1, 1, 1},   {5, 3, 1},     {20011, 3, 1}, {7, 1024, 1},  {3, 1025, 1},
      {2, 2048, 1}, {37, 17, 3},  {1, 2, 40001}, {9, 40, 49},   {530, 128, 1},
      {60, 3, 700}, {2, 2, 50000}, {300, 19, 129}, {40, 2, 127}, {50, 2, 4}};
  if (arguments == 1) layouts.insert(layouts.end(), more.begin(), more.end());
  test::TestAll<CudaKernels>(layouts);
  TestOutlier();
  test::TestAllChannels<CudaKernels>();
  return check::Result();
}
