// Copies several per-channel vectors between the device's arrays and pinned host memory in one
// launch, because separate copies would take longer than a small layer's kernels.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/cuda/passes.h"

namespace syncbn::cuda {

// Both ends are `size` numbers, float32 or float64, in memory that the device can access.
struct VectorCopy {
  const void* from;
  void* to;
  int64_t size;
  bool from_double, to_double;
  bool add;  // adds to the old values instead of replacing them
};

constexpr int kMaxVectors = 8;

// There must be at most kMaxVectors copies, and no copy may read a vector that another writes.
void CopyVectors(const std::vector<VectorCopy>& copies, Stream stream);

}  // namespace syncbn::cuda
