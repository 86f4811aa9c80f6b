// Reads and writes one slot of a plane, or one vector of columns.
// Who uses it: reduce.cuh and apply.cuh.
#pragma once
#include "kernels/cuda/numeric.h"
#include "kernels/cuda/partition.h"

namespace syncbn {
namespace cuda {

// Elements outside of the slot's plane are `filler`.
template <int kWidth, typename T>
__device__ inline Vector<T, kWidth> ReadSlot(const T* tensor, const Slot& slot, T filler) {
  if (slot.begin == 0 && slot.end == kWidth) {
    return *reinterpret_cast<const Vector<T, kWidth>*>(tensor + slot.offset);
  }
  Vector<T, kWidth> vector;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    vector.values[j] = filler;
    if (j >= slot.begin && j < slot.end) vector.values[j] = tensor[slot.offset + j];
  }
  return vector;
}

template <int kWidth, typename T>
__device__ inline void WriteSlot(T* tensor, const Slot& slot, const Vector<T, kWidth>& vector) {
  if (slot.begin == 0 && slot.end == kWidth) {
    *reinterpret_cast<Vector<T, kWidth>*>(tensor + slot.offset) = vector;
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (j >= slot.begin && j < slot.end) tensor[slot.offset + j] = vector.values[j];
  }
}

}  // namespace cuda
}  // namespace syncbn
