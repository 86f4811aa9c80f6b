// Batch normalization of one device's shard on a GPU: the mirror of cpu/batch_norm_cpu.h.
// Who uses it: op, and tests through c_api. Pointers, sizes and a stream: no locks, no allocation,
// no MXNet, and nothing of other devices.
//
// Tensors are (outer, channels, inner), row major, of type `dtype`, on the current device. Per-channel
// arrays hold `channels` doubles in memory that the device can reach (results may go straight to
// pinned host memory). A shard may be empty: sums are then 0, and nothing is written to tensors.
// Results are the same in every run on the same kind of device. Calls return when the work is queued;
// a call that the runtime refuses throws DeviceError with the name of the kernel.
#pragma once
#include <cstdint>

#include "core/activation.h"
#include "core/dtype.h"
#include "core/layout.h"

struct CUstream_st;  // what cudaStream_t points to

namespace syncbn {
namespace cuda {

using Stream = CUstream_st*;

// What happens to an output tensor: overwritten, or added to.
enum class Write { kAssign, kAdd };

// Bytes of scratch that LocalMoments and BackwardSums need on the current device; the
// caller owns it, for one call at a time. Its first kWorkspaceZeros bytes are zero before the first
// call; every call leaves them so, for whatever layout comes next.
constexpr int64_t kWorkspaceZeros = 32768;
int64_t WorkspaceBytes(DType dtype, const Layout& layout);

// mean[c], m2[c] = mean and sum of squared deviations of x[:, c, :]; 0, 0 for an empty shard.
void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace,
                  double* mean, double* m2, Stream stream);

// y = f((x - mean[c]) * scale[c] + offset[c])
void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
               const double* scale, const double* offset, const Activation& activation,
               Write write, void* y, Stream stream);

// Of each element of t, which is x or y as `recovery` says, and of dy the next two take
// u = x - mean[c], or z - mean[c] from y, and dz = dy * f'(z).

// sum_dz[c], sum_dz_u[c] = sums of dz and of dz * u over [:, c, :]
void BackwardSums(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u, Stream stream);

// dx = a[c] * dz + b[c] * u + d[c]
void BackwardApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                   const Recovery& recovery, const double* mean, const double* a,
                   const double* b, const double* d, Write write, void* dx, Stream stream);

// What the library has machine code for, such as "75-real 90-virtual".
const char* Architectures();

}  // namespace cuda
}  // namespace syncbn
