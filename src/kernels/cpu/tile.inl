// The code that all passes share, and the functions of one instruction set. isa_generic.cc and
// isa_x86.inl include this file after they define SYNCBN_ISA, SYNCBN_ISA_NAME, loads and stores.
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

// Calls run(an element of the type).
template <typename Run>
SYNCBN_INLINE void WithType(DType dtype, const Run& run) {
  if (dtype == DType::kFloat32) run(float());
  if (dtype == DType::kFloat64) run(double());
  if (dtype == DType::kFloat16) run(Half());
}

// Calls run(the variant of the pass, an element of its type). The variant must be one of kVariants.
template <Variant... kVariants, typename Run>
SYNCBN_INLINE void WithVariant(const PassInput& pass, const Run& run) {
  WithType(pass.dtype, [&](auto element) {
    ((VariantOf(pass) == kVariants ? run(VariantConstant<kVariants>(), element) : void()), ...);
  });
}

// Loads the first n elements at p, fewer than a vector, and `fill` into the other lanes.
template <typename T, typename Vector>
SYNCBN_INLINE void LoadPart(const T* p, int64_t n, T fill, Vector* v) {
  T padded[kFloats];
  for (int i = 0; i < kFloats; ++i) padded[i] = i < n ? p[i] : fill;
  Load(padded, v);
}

// Returns the address of the tile's first element of channel c, minus c * tile.inner.
template <typename T>
SYNCBN_INLINE const T* FirstOf(const T* x, const Tile& tile) {
  return x + tile.outer_begin * tile.row + tile.inner_begin;
}

// A tile of short planes as `count` rows of `width` columns, `stride` elements apart, and a last
// row of `rest` columns. A column is an inner element of a channel. A row has `repeats` outer
// indices, so that few channels also fill vectors.
struct Rows {
  int64_t offset, count, stride, width, rest, repeats;
};

inline Rows MakeRows(const Tile& tile) {
  const int64_t outer = tile.outer_end - tile.outer_begin;
  const int64_t width = (tile.channel_end - tile.channel_begin) * tile.inner;
  int64_t repeats = 1;
  if (width == tile.row) {
    repeats = kMaxColumns / width;
    if (repeats > 16) repeats -= repeats % 16;  // then a row is a multiple of a vector
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
    if (tile.inner == 1) {  // the compiler vectorizes this loop
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

#include "kernels/cpu/map.inl"
#include "kernels/cpu/reduce.inl"

namespace syncbn::cpu {

const Isa SYNCBN_ISA = {SYNCBN_ISA_NAME, PickMoments, PickNormalize, PickSums, PickApply};

}  // namespace syncbn::cpu
