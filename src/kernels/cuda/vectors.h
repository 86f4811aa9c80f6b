// Moves a layer's per-channel vectors between the device's arrays and pinned host memory, several
// in one launch, because a copy of each would take longer than a small layer's kernels. It must not
// know what the vectors mean.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/cuda/passes.h"

namespace syncbn::cuda {

// Both ends are `size` numbers, float32 or float64, in memory that the device can reach.
struct VectorCopy {
  const void* from;
  void* to;
  int64_t size;
  bool from_double, to_double;
  bool add;  // to the old values, instead of replacing them
};

constexpr int kMaxVectors = 8;

// At most kMaxVectors copies, none of which reads what another writes.
void CopyVectors(const std::vector<VectorCopy>& copies, Stream stream);

}  // namespace syncbn::cuda
