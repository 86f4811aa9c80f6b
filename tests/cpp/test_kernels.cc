// The CPU kernels, see kernel_tests.h. CMake registers this once for each instruction set.
#include "channel_tests.h"
#include "kernel_tests.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cpu/channels_cpu.h"

namespace cpu = syncbn::cpu;
using syncbn::DType;
using syncbn::Layout;

namespace {

struct CpuKernels {
  static constexpr int64_t kWorkspaceZeros = 0;
  static int64_t WorkspaceBytes(DType /*dtype*/, const Layout& layout) {
    return cpu::WorkspaceBytes(layout);
  }
  // All sums are float64.
  static double SumError(DType /*dtype*/, double n) { return 0x1p-53 * n; }
  static double SumEps(DType /*dtype*/) { return 0x1p-53; }
  static constexpr auto LocalMoments = cpu::LocalMoments;
  static constexpr auto Normalize = cpu::Normalize;
  static constexpr auto BackwardSums = cpu::BackwardSums;
  static constexpr auto BackwardApply = cpu::BackwardApply;
  static constexpr auto Gather = cpu::GatherChannels;
  static constexpr auto Scatter = cpu::ScatterChannels;
};

}  // namespace

int main() {
  std::cout << cpu::InstructionSet() << std::endl;
  test::TestAll<CpuKernels>(
      {{1, 1, 1},    {3, 5, 7},     {2, 3, 64},     {2, 3, 65},   {5, 3, 1},    {20011, 3, 1},
       {7, 1024, 1}, {3, 1025, 1},  {2, 2048, 1},   {37, 17, 3},  {4, 6, 1023}, {1, 2, 40001},
       {9, 33, 49},  {530, 130, 1}, {60, 3, 700},   {3, 2000, 2}, {1, 70000, 1}, {12, 40, 127}});
  for (const Layout& layout : {Layout{0, 4, 5}, Layout{3, 4, 0}})
    CHECK_EQ(cpu::WorkspaceBytes(layout), 0);
  test::TestAllChannels<CpuKernels>();
  return check::Result();
}
