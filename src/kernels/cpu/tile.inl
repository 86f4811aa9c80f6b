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

// Returns select(variant, element). `variant` holds the variant of the pass, one of kVariants, and
// `element` has the C++ type of the pass's dtype.
template <typename Kernel, Variant... kVariants, typename Select>
SYNCBN_INLINE Kernel Pick(const PassInput& pass, const Select& select) {
  Kernel kernel = nullptr;
  const auto with = [&](auto element) {
    const auto set = [&](auto variant) { kernel = select(variant, element); };
    ((VariantOf(pass) == kVariants ? set(VariantConstant<kVariants>()) : void()), ...);
  };
  if (pass.dtype == DType::kFloat32) with(float());
  if (pass.dtype == DType::kFloat64) with(double());
  if (pass.dtype == DType::kFloat16) with(Half());
  return kernel;
}

// Loads the first n elements at p, fewer than a vector, and `fill` into the other lanes.
template <typename T, typename Vector>
SYNCBN_INLINE void LoadPart(const T* p, int64_t n, T fill, Vector* v) {
  T padded[kFloats];
  for (int i = 0; i < kFloats; ++i) padded[i] = i < n ? p[i] : fill;
  Load(padded, v);
}

// Returns the tile's first element of a channel.
template <typename T>
SYNCBN_INLINE T FirstOf(const T* x, const Tile& tile, int64_t channel) {
  const int64_t at = tile.outer_begin * tile.row;
  if (tile.block == 1) return x[at + channel * tile.inner + tile.inner_begin];
  return x[at + tile.channel_begin * tile.inner + tile.inner_begin * tile.block + channel -
           tile.channel_begin];
}

// A tile's rows if the inner size is smaller than kMinPlane (tiles.h). `count` rows have `width`
// columns, and a last row has `rest`. Each row begins `stride` elements after the row before it. A
// row of `width` columns has the tile's elements at `repeats` adjacent outer indices.
struct Rows {
  int64_t offset, count, stride, width, rest, repeats;
};

inline Rows MakeRows(const Tile& tile) {
  const int64_t outer = tile.outer_end - tile.outer_begin;
  const int64_t width = (tile.channel_end - tile.channel_begin) * tile.inner;
  int64_t repeats = 1;
  if (width == tile.row) {  // elements at adjacent outer indices are contiguous
    repeats = kMaxColumns / width;
    if (repeats > 16) repeats -= repeats % 16;  // rows of whole vectors
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
