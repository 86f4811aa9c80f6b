// The kernels of a GPU: the four passes of kernels/passes.h, and copies of per-channel vectors.
//
// All memory must be accessible to the current device; pinned host memory is. Results are the same
// in every run on the same kind of device. Functions queue work on the stream, and throw
// DeviceError if CUDA refuses it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/passes.h"

namespace syncbn::cuda {

// Returns the size of the workspace of LocalMoments and BackwardSums on the current device, for any
// layout. One call at a time may use a workspace. Its first kWorkspaceZeros bytes must be zero
// before the first call, and every call restores the zeros.
int64_t WorkspaceBytes();
constexpr int64_t kWorkspaceZeros = 32768;

void LocalMoments(const ReductionPass& pass, void* workspace, cudaStream_t stream);
void Normalize(const ElementwisePass& pass, cudaStream_t stream);
void BackwardSums(const ReductionPass& pass, void* workspace, cudaStream_t stream);
void BackwardApply(const ElementwisePass& pass, cudaStream_t stream);

struct VectorCopy {
  const void* from;
  void* to;
  int64_t size;                 // numbers
  bool from_double, to_double;  // else float32
  bool add;                     // adds to the old numbers instead of replacing them
};

constexpr int kMaxVectors = 8;

// Copies at most kMaxVectors vectors in one launch, because separate copies would take longer than
// a small layer's kernels. No copy may read a vector that another writes.
void CopyVectors(const std::vector<VectorCopy>& copies, cudaStream_t stream);

}  // namespace syncbn::cuda
