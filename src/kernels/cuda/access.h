// Reads and writes one slot of a plane, or one vector of columns.
#pragma once
#include <cstring>
#include <type_traits>

#include "kernels/cuda/numeric.h"
#include "kernels/cuda/partition.h"

namespace syncbn::cuda {

// True if all of a slot's vector belongs to the plane; `kAligned` as in Planes::SlotOf.
template <bool kAligned, int kWidth>
__device__ inline bool IsFull(const Slot& slot) {
  return kAligned ? slot.end > 0 : slot.begin == 0 && slot.end == kWidth;
}

// The bits of a vector. A vector has this form until both branches of ReadSlot have ended: the
// compiler would unpack 16-bit elements as soon as each vector arrives, and so wait for every load
// before it starts the next.
template <typename T, int kWidth>
struct [[gnu::may_alias]] alignas(sizeof(T) * kWidth) Bits {
  static constexpr int kBytes = sizeof(T) * kWidth;
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  Word words[kBytes / sizeof(Word)];
};

// Elements outside of the slot's plane are `filler`.
template <bool kAligned, int kWidth, typename T>
__device__ inline Vector<T, kWidth> ReadSlot(const T* tensor, const Slot& slot, T filler) {
  Vector<T, kWidth> vector;
  Bits<T, kWidth> bits;
  if (IsFull<kAligned, kWidth>(slot)) {
    bits = *reinterpret_cast<const Bits<T, kWidth>*>(tensor + slot.offset);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const bool inside = !kAligned && j >= slot.begin && j < slot.end;
      vector.values[j] = inside ? tensor[slot.offset + j] : filler;
    }
    memcpy(&bits, &vector, sizeof(bits));
  }
  memcpy(&vector, &bits, sizeof(bits));
  return vector;
}

template <bool kAligned, int kWidth, typename T>
__device__ inline void WriteSlot(T* tensor, const Slot& slot, const Vector<T, kWidth>& vector) {
  if (IsFull<kAligned, kWidth>(slot)) {
    *reinterpret_cast<Vector<T, kWidth>*>(tensor + slot.offset) = vector;
  } else if constexpr (!kAligned) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= slot.begin && j < slot.end) tensor[slot.offset + j] = vector.values[j];
    }
  }
}

}  // namespace syncbn::cuda
