// The CPU kernels in the form that kernel_tests.h takes.
// Who uses it: test_kernels.cc and test_same_bits.cc.
#pragma once
#include "kernels/cpu/batch_norm_cpu.h"

namespace test {

struct CpuKernels {
  static constexpr int64_t kWorkspaceZeros = 0;
  static int64_t WorkspaceBytes(syncbn::DType /*dtype*/, const syncbn::Layout& layout) {
    return syncbn::cpu::WorkspaceBytes(layout);
  }
  // All sums are float64.
  static double SumError(syncbn::DType /*dtype*/, double n) { return 0x1p-53 * n; }
  static double SumEps(syncbn::DType /*dtype*/) { return 0x1p-53; }
  static constexpr auto LocalMoments = syncbn::cpu::LocalMoments;
  static constexpr auto Normalize = syncbn::cpu::Normalize;
  static constexpr auto BackwardSums = syncbn::cpu::BackwardSums;
  static constexpr auto BackwardApply = syncbn::cpu::BackwardApply;
};

}  // namespace test
