// The CUDA kernels' logic on the CPU, see emulated_cuda/cuda_runtime.h and kernel_tests.h.
#include "channel_tests.h"
#include "kernel_tests.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "kernels/cuda/channels.h"
#include "kernels/cuda/partition.h"

namespace cuda = syncbn::cuda;
using syncbn::Activation;
using syncbn::DType;
using syncbn::Layout;
using syncbn::Recovery;

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
  static void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace,
                           double* mean, double* m2) {
    cuda::LocalMoments(dtype, x, layout, workspace, mean, m2, nullptr);
  }
  static double SumEps(DType dtype) { return test::EpsOf(dtype); }
  static void FindBelow(DType dtype, const void* t, const Layout& layout, const double* bound,
                        void* workspace, double* found) {
    cuda::FindBelow(dtype, t, layout, bound, workspace, found, nullptr);
  }
  static void BackwardSums(DType dtype, const void* t, const void* dy, const Layout& layout,
                           const Recovery& recovery, const double* mean, void* workspace,
                           double* sum_dz, double* sum_dz_u) {
    cuda::BackwardSums(dtype, t, dy, layout, recovery, mean, workspace, sum_dz, sum_dz_u, nullptr);
  }
  static void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
                        const double* scale, const double* offset, const Activation& activation,
                        bool add, void* y) {
    cuda::Normalize(dtype, x, layout, mean, scale, offset, activation,
                    add ? cuda::Write::kAdd : cuda::Write::kAssign, y, nullptr);
  }
  static void BackwardApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                            const Recovery& recovery, const double* mean, const double* a,
                            const double* b, const double* d, bool add, void* dx) {
    cuda::BackwardApply(dtype, t, dy, layout, recovery, mean, a, b, d,
                        add ? cuda::Write::kAdd : cuda::Write::kAssign, dx, nullptr);
  }
  static void Gather(DType dtype, const void* tensor, const Layout& layout,
                     const std::vector<int64_t>& channels, void* compact) {
    const std::vector<double> numbers(channels.begin(), channels.end());
    const cuda::ChannelList list{numbers.data(), static_cast<int64_t>(numbers.size())};
    cuda::GatherChannels(dtype, tensor, layout, list, compact, nullptr);
  }
  static void Scatter(DType dtype, const void* compact, const Layout& layout,
                      const std::vector<int64_t>& channels, void* tensor) {
    const std::vector<double> numbers(channels.begin(), channels.end());
    const cuda::ChannelList list{numbers.data(), static_cast<int64_t>(numbers.size())};
    cuda::ScatterChannels(dtype, compact, layout, list, tensor, nullptr);
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
    CudaKernels::LocalMoments(DType::kFloat32, p.x.data(), layout, workspace.data(), mean.data(),
                              m2.data());
    for (int64_t c = 0; c < layout.channels; ++c) {
      const test::Moments e = p.ExpectedMoments(c);
      CHECK_NEAR(mean[c], e.mean, 1e-6, p.label);
      CHECK_NEAR(m2[c], e.m2, 1e-4 * static_cast<double>(e.m2), p.label);
    }
  }
}

}  // namespace

int main() {
  test::TestAll<CudaKernels>(
      {{1, 1, 1},      {3, 5, 7},     {2, 3, 64},   {5, 3, 1},    {20011, 3, 1}, {9000, 8, 1},
       {7, 1024, 1},   {3, 1025, 1},  {2, 2048, 1}, {37, 17, 3},  {4, 6, 1023},  {1, 2, 40001},
       {9, 40, 49},    {530, 128, 1}, {60, 3, 700}, {5, 48, 196}, {2, 2, 50000}, {3, 16, 225},
       {300, 19, 129}, {40, 2, 127},  {50, 2, 4}});
  TestOutlier();
  test::TestAllChannels<CudaKernels>();
  return check::Result();
}
