// Common part of the passes on a tile, and the table of one instruction set.
// Who includes it: isa_generic.cc and isa_x86.inl, after SYNCBN_ISA, SYNCBN_ISA_NAME and the set's
// loads and stores.
#include "core/host_device.h"
#include "kernels/cpu/tiles.h"

namespace syncbn::cpu {
namespace {

#define SYNCBN_FORMULA SYNCBN_INLINE
#include "kernels/activation.inl"
#undef SYNCBN_FORMULA

template <Variant kVariant>
struct VariantConstant {
  static constexpr Variant value = kVariant;
};

// Calls run(a constant of the pass's variant), which is one of kVariants.
template <Variant... kVariants, typename Run>
SYNCBN_INLINE void WithVariant(const PassInput& pass, const Run& run) {
  const Variant variant = VariantOf(pass);
  (void)((variant == kVariants && (run(VariantConstant<kVariants>()), true)) || ...);
}

// Calls run(an element of the type).
template <typename Run>
SYNCBN_INLINE void WithType(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat32: return run(float());
    case DType::kFloat64: return run(double());
    case DType::kFloat16: return run(Half());
  }
}

// The first n elements at p, fewer than a vector, and `fill` in the other lanes.
template <typename T, typename Vector>
SYNCBN_INLINE void LoadPart(const T* p, int64_t n, T fill, Vector* v) {
  T padded[kFloats];
  for (int i = 0; i < kFloats; ++i) padded[i] = i < n ? p[i] : fill;
  Load(padded, v);
}

// The address of the tile's first element of channel c, less c * tile.inner.
template <typename T>
SYNCBN_INLINE const T* FirstOf(const T* x, const Tile& tile) {
  return x + tile.outer_begin * tile.row + tile.inner_begin;
}

// A tile of short planes, seen as `count` rows of `width` columns that lie `stride` apart, and a
// last row of `rest` columns. Short rows that follow each other in memory are joined, so that
// three channels fill a vector as well as a thousand.
struct Rows {
  int64_t offset, count, stride, width, rest, repeats;
};

inline Rows MakeRows(const Tile& tile) {
  const int64_t outer = tile.outer_end - tile.outer_begin;
  const int64_t width = (tile.channel_end - tile.channel_begin) * tile.inner;
  int64_t repeats = 1;
  if (width == tile.row) {
    repeats = kMaxColumns / width;
    if (repeats > 16) repeats -= repeats % 16;  // rows then start at multiples of a vector
    if (repeats > outer) repeats = outer;
  }
  return {tile.outer_begin * tile.row + tile.channel_begin * tile.inner,
          outer / repeats,
          tile.row * repeats,
          width * repeats,
          outer % repeats * width,
          repeats};
}

// Calls visit(column, channel) for the columns of a row, in order.
template <typename Visit>
SYNCBN_INLINE void ForEachColumn(const Rows& rows, const Tile& tile, const Visit& visit) {
  int64_t j = 0;
  for (int64_t repeat = 0; repeat < rows.repeats; ++repeat) {
    if (tile.inner == 1) {  // apart, because this loop can be vectorized
      for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c)
        visit(j + c - tile.channel_begin, c);
      j += tile.channel_end - tile.channel_begin;
      continue;
    }
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      for (int64_t i = 0; i < tile.inner; ++i) visit(j++, c);
    }
  }
}

}  // namespace
}  // namespace syncbn::cpu

#include "kernels/cpu/reduce.inl"
#include "kernels/cpu/map.inl"

#include "kernels/cpu/moments.inl"
#include "kernels/cpu/normalize.inl"
#include "kernels/cpu/sums.inl"
#include "kernels/cpu/apply.inl"

namespace syncbn::cpu {

const Isa SYNCBN_ISA = {SYNCBN_ISA_NAME, RunMoments, RunNormalize, RunSums, RunApply};

}  // namespace syncbn::cpu
