// Batch normalization of one device's shard on the CPU: the four passes over memory.
// Who uses it: op, and tests through c_api. Pointers and sizes only: no locks, no allocation,
// no MXNet, and nothing of other devices.
//
// Tensors are (outer, channels, inner), row major, of type `dtype`. Per-channel arrays hold
// `channels` doubles. A shard may be empty (outer or inner is 0): sums are then 0, and nothing is
// written to tensors. Results are the same in every run, whatever the number of threads.
#pragma once
#include <cstdint>

#include "core/activation.h"
#include "core/between.h"
#include "core/dtype.h"
#include "core/layout.h"

namespace syncbn {
namespace cpu {

// What happens to an output tensor: overwritten, or added to.
enum class Write { kAssign, kAdd };

// Bytes of scratch that every function with a `workspace` needs for this layout; the caller owns it.
int64_t WorkspaceBytes(const Layout& layout);

// mean[c], m2[c] = mean and sum of squared deviations of x[:, c, :]; 0, 0 for an empty shard.
void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace,
                  double* mean, double* m2);

// y = f((x - mean[c]) * scale[c] + offset[c])
void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
               const double* scale, const double* offset, const Activation& activation,
               Write write, void* y);

// LocalMoments, `between`, Normalize. Where it pays, blocks of channels go through all three one after
// the other, so that x is still in cache: then `between` is called for each, from several threads at
// once. It must not throw. The results are those of the three, bit for bit.
void MomentsAndNormalize(DType dtype, const void* x, const Layout& layout, void* workspace,
                         double* mean, double* m2, const Between& between, const double* scale,
                         const double* offset, const Activation& activation, Write write, void* y);

// Of each element of t, which is x or y as `recovery` says, and of dy the next two take
// u = x - mean[c], or z - mean[c] from y, and dz = dy * f'(z).

// sum_dz[c], sum_dz_u[c] = sums of dz and of dz * u over [:, c, :]
void BackwardSums(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u);

// dx = a[c] * dz + b[c] * u + d[c]
void BackwardApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                   const Recovery& recovery, const double* mean, const double* a,
                   const double* b, const double* d, Write write, void* dx);

// BackwardSums, `between`, BackwardApply, as in MomentsAndNormalize.
void SumsAndApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u, const Between& between, const double* a, const double* b,
                  const double* d, Write write, void* dx);

// The instruction set that was chosen for this machine: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace cpu
}  // namespace syncbn
