// The kernels of a GPU: the four passes of kernels/passes.h, and copies of per-channel vectors.
//
// A pass's tensors are on the current device, and its per-channel arrays in memory that the device
// can access. `first` and `second` may be in pinned host memory. Results are the same in every run
// on the same kind of device. Functions return when the work is queued, and throw DeviceError if it
// cannot be queued.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/passes.h"

struct CUstream_st;  // cudaStream_t points to it

namespace syncbn::cuda {

using Stream = CUstream_st*;

// The scratch bytes that LocalMoments and BackwardSums need on the current device, whatever the
// layout. The caller owns the memory and passes it to one call at a time. Its first kWorkspaceZeros
// bytes must be zero before the first call; every call restores the zeros.
constexpr int64_t kWorkspaceZeros = 32768;
int64_t WorkspaceBytes();

void LocalMoments(const ReductionPass& pass, void* workspace, Stream stream);
void Normalize(const ElementwisePass& pass, Stream stream);
void BackwardSums(const ReductionPass& pass, void* workspace, Stream stream);
void BackwardApply(const ElementwisePass& pass, Stream stream);

// `from` and `to` are `size` numbers each, float32 or float64, in memory that the device accesses.
struct VectorCopy {
  const void* from;
  void* to;
  int64_t size;
  bool from_double, to_double;
  bool add;  // adds to the old values instead of replacing them
};

constexpr int kMaxVectors = 8;

// Copies several per-channel vectors in one launch, because separate copies would take longer than
// a small layer's kernels. There must be at most kMaxVectors copies, and no copy may read a vector
// that another writes.
void CopyVectors(const std::vector<VectorCopy>& copies, Stream stream);

}  // namespace syncbn::cuda
