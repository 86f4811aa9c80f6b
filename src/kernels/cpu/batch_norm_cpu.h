// Batch normalization of one device's shard on the CPU: the four passes over memory.
// Who uses it: op, and tests through c_api. Pointers and sizes only: no locks, no allocation,
// no MXNet, and nothing of other devices.
//
// Tensors are (outer, channels, inner), row major, of type `dtype`. Per-channel arrays hold
// `channels` doubles. A shard may be empty (outer or inner is 0): sums are then 0, and nothing is
// written to tensors. Results are the same in every run, whatever the number of threads.
#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/layout.h"

namespace syncbn {
namespace cpu {

// What happens to an output tensor: overwritten, or added to.
enum class Write { kAssign, kAdd };

// Bytes of scratch that LocalMoments and BackwardSums need for this layout; the caller owns it.
int64_t WorkspaceBytes(const Layout& layout);

// mean[c], m2[c] = mean and sum of squared deviations of x[:, c, :]; 0, 0 for an empty shard.
void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace,
                  double* mean, double* m2);

// y = (x - mean[c]) * scale[c] + offset[c]
void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
               const double* scale, const double* offset, Write write, void* y);

// sum_dy[c] = sum of dy[:, c, :]; sum_dy_xmu[c] = sum of dy * (x - mean[c])
void BackwardSums(DType dtype, const void* x, const void* dy, const Layout& layout,
                  const double* mean, void* workspace, double* sum_dy, double* sum_dy_xmu);

// dx = a[c] * dy + b[c] * (x - mean[c]) + d[c]
void BackwardApply(DType dtype, const void* x, const void* dy, const Layout& layout,
                   const double* mean, const double* a, const double* b, const double* d,
                   Write write, void* dx);

// The instruction set that was chosen for this machine: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace cpu
}  // namespace syncbn
