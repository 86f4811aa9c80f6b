// Batch normalization of one device's shard on a GPU: the mirror of cpu/passes.h. Pointers, sizes
// and a stream: no locks, no allocation, no MXNet, and nothing of other devices.
//
// A pass's tensors are on the current device, its per-channel arrays in memory that the device can
// reach (results may go straight to pinned host memory). Results are the same in every run on the
// same kind of device. Calls return when the work is queued; a call that the runtime refuses throws
// DeviceError with the name of the kernel.
#pragma once
#include <cstdint>

#include "kernels/passes.h"

struct CUstream_st;  // what cudaStream_t points to

namespace syncbn::cuda {

using Stream = CUstream_st*;

// Bytes of scratch that LocalMoments and BackwardSums need on the current device, whatever the
// layout; the caller owns it, for one call at a time. Its first kWorkspaceZeros bytes are zero
// before the first call, and every call leaves them so.
constexpr int64_t kWorkspaceZeros = 32768;
int64_t WorkspaceBytes();

void LocalMoments(const ReductionPass& pass, void* workspace, Stream stream);
void Normalize(const ElementwisePass& pass, Stream stream);
void BackwardSums(const ReductionPass& pass, void* workspace, Stream stream);
void BackwardApply(const ElementwisePass& pass, Stream stream);

}  // namespace syncbn::cuda
