// The passes that write a tensor, element by element. The output may be one of the inputs.
// Arithmetic is float32 (float64 for float64 data).
//
// A `Formula` has Channel(pass, c), which returns a channel's coefficients; Of(in, dy,
// coefficients, slopes), which returns the result; kBackward, true if it reads dy; and
// kRecomputesZ, true if backward computes the activation's input z again.

namespace syncbn::cpu {
namespace {

template <typename T>
struct Arithmetic {
  typedef float Scalar;
  typedef Floats Vector;
};
template <>
struct Arithmetic<double> {
  typedef double Scalar;
  typedef Doubles Vector;
};

// A Value is a scalar of one channel, or a vector whose elements may belong to several channels.
template <typename Value>
struct Coefficients {
  Affine<Value> to_z;
  Value scale_dz, scale_in, unit, shift;  // only ApplyFormula uses scale_dz and unit
};

// kStream bypasses the caches, because they could not keep a large output until another operator
// reads it. Other stores read the output into the caches first.
enum class StoreMode { kAssign, kStream, kAdd };

constexpr int64_t kStreamBytes = 8 << 20;  // smaller outputs do not use kStream

template <StoreMode kMode, typename Formula, typename T, typename Vector>
SYNCBN_INLINE void MapVector(const T* in, const T* dy, const Coefficients<Vector>& k,
                             const Slopes<Vector>& f, T* out) {
  Vector in_vector, dy_vector = {}, old = {};
  Load(in, &in_vector);
  if (Formula::kBackward) Load(dy, &dy_vector);
  if (kMode == StoreMode::kAdd) Load(out, &old);
  const Vector value = Formula::Of(in_vector, dy_vector, k, f);
  if constexpr (kMode == StoreMode::kStream)
    Stream(out, value);
  else
    Store(out, kMode == StoreMode::kAdd ? value + old : value);
}

// Writes n elements, fewer than a vector. Inlining would double the code of every loop. The
// coefficients are passed by value, so the caller can keep its own in registers.
template <StoreMode kMode, typename Formula, typename T, typename Vector>
SYNCBN_NOINLINE void MapPart(const T* in, const T* dy, int64_t n, Coefficients<Vector> k,
                             Slopes<Vector> f, T* out) {
  Vector in_vector, dy_vector = {}, old = {};
  LoadPart(in, n, T{}, &in_vector);
  if (Formula::kBackward) LoadPart(dy, n, T{}, &dy_vector);
  if (kMode == StoreMode::kAdd) LoadPart(out, n, T{}, &old);
  const Vector value = Formula::Of(in_vector, dy_vector, k, f);
  T padded[kFloats];
  Store(padded, kMode == StoreMode::kAdd ? value + old : value);
  for (int i = 0; i < n; ++i) out[i] = padded[i];
}

// Returns the number of elements from p to the next address that Stream accepts.
template <typename T>
SYNCBN_INLINE int64_t UnalignedHead(const T* p) {
  const int64_t beyond = int64_t(reinterpret_cast<uintptr_t>(p) % kVectorBytes);
  return beyond == 0 ? 0 : (kVectorBytes - beyond) / int64_t(sizeof(T));
}

template <StoreMode kMode, typename Formula, typename T>
void MapPlanes(const ElementwisePass& pass, const Tile& tile) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  const T *const in = static_cast<const T*>(pass.in), *const dy = static_cast<const T*>(pass.dy);
  T* const out = static_cast<T*>(pass.out);
  const Slopes<Vector> f = MakeSlopes<Vector, Scalar>(pass.activation.slope);
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      const Coefficients<Scalar> scalar = Formula::template Channel<Scalar>(pass, c);
      const Vector zero = {};
      const Coefficients<Vector> k = {
          {zero + scalar.to_z.center, zero + scalar.to_z.scale, zero + scalar.to_z.offset},
          zero + scalar.scale_dz,
          zero + scalar.scale_in,
          zero + scalar.unit,
          zero + scalar.shift};
      const int64_t at = o * tile.row + c * tile.inner;
      int64_t i = at + tile.inner_begin;
      const int64_t end = at + tile.inner_end;
      if constexpr (kMode == StoreMode::kStream) {
        int64_t head = UnalignedHead(out + i);
        if (head > end - i) head = end - i;
        if (head > 0) MapPart<kMode, Formula>(in + i, dy + i, head, k, f, out + i);
        i += head;
      }
      for (; i + kLanes <= end; i += kLanes)
        MapVector<kMode, Formula>(in + i, dy + i, k, f, out + i);
      if (i < end) MapPart<kMode, Formula>(in + i, dy + i, end - i, k, f, out + i);
    }
  }
  if constexpr (kMode == StoreMode::kStream) EndStreamingStores();
}

// The coefficients of the columns of a row, padded to whole vectors. One array of all coefficients
// instead of these members would make a pass twice as slow with GCC.
template <typename Scalar, bool kRecomputesZ>
struct ColumnCoefficients {
  static constexpr int64_t kSize = kMaxColumns + kFloats;
  alignas(64) Scalar center[kSize];
  alignas(64) Scalar scale_dz[kSize];
  alignas(64) Scalar scale_in[kSize];
  alignas(64) Scalar unit[kSize];
  alignas(64) Scalar shift[kSize];
  alignas(64) Scalar to_z_scale[kRecomputesZ ? kSize : 1];
  alignas(64) Scalar to_z_offset[kRecomputesZ ? kSize : 1];
};

template <StoreMode kMode, typename Formula, typename T, typename Scalar>
void MapRow(const T* in, const T* dy, int64_t width,
            const ColumnCoefficients<Scalar, Formula::kRecomputesZ>& columns,
            const Slopes<typename Arithmetic<T>::Vector>& f, T* out) {
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  for (int64_t j = 0; j < width; j += kLanes) {
    Coefficients<Vector> k = {};
    Load(columns.center + j, &k.to_z.center);
    if (Formula::kRecomputesZ) Load(columns.to_z_scale + j, &k.to_z.scale);
    if (Formula::kRecomputesZ) Load(columns.to_z_offset + j, &k.to_z.offset);
    if (Formula::kBackward) Load(columns.scale_dz + j, &k.scale_dz);
    Load(columns.scale_in + j, &k.scale_in);
    if (Formula::kBackward) Load(columns.unit + j, &k.unit);
    Load(columns.shift + j, &k.shift);
    if (j + kLanes <= width)
      MapVector<kMode, Formula>(in + j, dy + j, k, f, out + j);
    else
      MapPart<kMode, Formula>(in + j, dy + j, width - j, k, f, out + j);
  }
}

// Returns true if Stream accepts the addresses of all vectors of the rows.
template <typename T>
bool HasAlignedRows(const T* out, const Rows& rows) {
  out += rows.offset;
  return UnalignedHead(out) == 0 && UnalignedHead(out + rows.stride) == 0;
}

template <StoreMode kMode, typename Formula, typename T>
void MapColumns(const ElementwisePass& pass, const Tile& tile) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  const Rows rows = MakeRows(tile);
  T* const out = static_cast<T*>(pass.out);
  if constexpr (kMode == StoreMode::kStream) {
    if (!HasAlignedRows(out, rows)) return MapColumns<StoreMode::kAssign, Formula, T>(pass, tile);
  }
  ColumnCoefficients<Scalar, Formula::kRecomputesZ> columns;
  __builtin_memset(&columns, 0, sizeof(columns));
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    const Coefficients<Scalar> k = Formula::template Channel<Scalar>(pass, c);
    columns.center[j] = k.to_z.center;
    if (Formula::kRecomputesZ) columns.to_z_scale[j] = k.to_z.scale;
    if (Formula::kRecomputesZ) columns.to_z_offset[j] = k.to_z.offset;
    if (Formula::kBackward) columns.scale_dz[j] = k.scale_dz;
    columns.scale_in[j] = k.scale_in;
    if (Formula::kBackward) columns.unit[j] = k.unit;
    columns.shift[j] = k.shift;
  });
  const T *const in = static_cast<const T*>(pass.in), *const dy = static_cast<const T*>(pass.dy);
  const auto f = MakeSlopes<typename Arithmetic<T>::Vector, Scalar>(pass.activation.slope);
  for (int64_t row = 0; row <= rows.count; ++row) {
    const int64_t at = rows.offset + row * rows.stride;
    const int64_t width = row < rows.count ? rows.width : rows.rest;
    MapRow<kMode, Formula>(in + at, dy + at, width, columns, f, out + at);
  }
  if constexpr (kMode == StoreMode::kStream) EndStreamingStores();
}

// Writes a tile that is one block of channels. kGroups vectors hold a pixel, or one vector holds
// two pixels.
template <int kGroups, StoreMode kMode, typename Formula, typename T>
void MapBlock(const ElementwisePass& pass, const Tile& tile) {
  if constexpr (kMode == StoreMode::kStream) {
    const bool is_aligned = UnalignedHead(static_cast<T*>(pass.out)) == 0 &&
                            tile.inner * tile.block % kFloats == 0 &&
                            tile.inner_begin * tile.block % kFloats == 0;
    if (!is_aligned) return MapBlock<kGroups, StoreMode::kAssign, Formula, T>(pass, tile);
  }
  typedef typename Arithmetic<T>::Scalar Scalar;
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar), kPeriod = kGroups * kLanes;
  Coefficients<Vector> k[kGroups];
  for (int64_t i = 0; i < kPeriod; ++i) {
    const Coefficients<Scalar> one =
        Formula::template Channel<Scalar>(pass, tile.channel_begin + i % tile.block);
    Coefficients<Vector>* const to = &k[i / kLanes];
    const int64_t lane = i % kLanes;
    to->to_z.center[lane] = one.to_z.center;
    to->to_z.scale[lane] = one.to_z.scale;
    to->to_z.offset[lane] = one.to_z.offset;
    to->scale_dz[lane] = one.scale_dz;
    to->scale_in[lane] = one.scale_in;
    to->unit[lane] = one.unit;
    to->shift[lane] = one.shift;
  }
  const T *const in = static_cast<const T*>(pass.in), *const dy = static_cast<const T*>(pass.dy);
  T* const out = static_cast<T*>(pass.out);
  const Slopes<Vector> f = MakeSlopes<Vector, Scalar>(pass.activation.slope);
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    int64_t i = o * tile.row + tile.channel_begin * tile.inner + tile.inner_begin * tile.block;
    const int64_t end = i + (tile.inner_end - tile.inner_begin) * tile.block;
    for (; i + kPeriod <= end; i += kPeriod) {
      for (int64_t j = i, g = 0; g < kGroups; ++g, j += kLanes)
        MapVector<kMode, Formula>(in + j, dy + j, k[g], f, out + j);
    }
    if (i < end) MapPart<kMode, Formula>(in + i, dy + i, end - i, k[0], f, out + i);
  }
  if constexpr (kMode == StoreMode::kStream) EndStreamingStores();
}

template <StoreMode kMode, typename Formula, typename T>
MapTile MapByLayout(const ElementwisePass& pass) {
  if constexpr (kCanBlock<T>) {
    const int64_t block = pass.layout.block;
    if (block == 8) return MapBlock < kFloats < 8 ? 8 / kFloats : 1, kMode, Formula, T > ;
    if (block == 16) return MapBlock<16 / kFloats, kMode, Formula, T>;
  }
  return pass.layout.inner < kMinPlane ? MapColumns<kMode, Formula, T>
                                       : MapPlanes<kMode, Formula, T>;
}

template <typename Formula, typename T>
MapTile MapOf(const ElementwisePass& pass) {
  if (pass.mode == WriteMode::kAdd) return MapByLayout<StoreMode::kAdd, Formula, T>(pass);
  if constexpr (kCanStream<T>) {
    // Arrays that wrap memory of another library may be unaligned.
    const bool aligned = reinterpret_cast<uintptr_t>(pass.out) % sizeof(T) == 0;
    const int64_t size = pass.layout.outer * pass.layout.channels * pass.layout.inner;
    if (aligned && size * int64_t(sizeof(T)) >= kStreamBytes) {
      return MapByLayout<StoreMode::kStream, Formula, T>(pass);
    }
  }
  return MapByLayout<StoreMode::kAssign, Formula, T>(pass);
}

// ---- the second pass of forward: y = f(z), z = (x - mean) * scale + offset ----------------------

template <Variant kVariant>
struct NormalizeFormula {
  static constexpr bool kBackward = false, kRecomputesZ = false;

  template <typename Scalar>
  static SYNCBN_INLINE Coefficients<Scalar> Channel(const ElementwisePass& pass, int64_t c) {
    const Affine<Scalar> to_z = MakeAffine<Scalar>(pass.mean[c], pass.scale[c], pass.offset[c]);
    return {to_z, 0, to_z.scale, 0, to_z.offset};
  }
  template <typename Vector>
  static SYNCBN_INLINE Vector Of(Vector x, Vector /*dy*/, const Coefficients<Vector>& k,
                                 const Slopes<Vector>& f) {
    return Activate(kVariant, k.scale_in * (x - k.to_z.center) + k.shift, f);
  }
};

MapTile PickNormalize(const ElementwisePass& pass) {
  return Pick<MapTile, kPlain, kLeakyOfX>(pass, [&](auto variant, auto element) {
    return MapOf<NormalizeFormula<variant.value>, decltype(element)>(pass);
  });
}

// ---- the second pass of backward: dx = scale * dz + scale_xmu * xmu + shift ---------------------
//
// activation.inl explains xmu, dz and `centered`, and why the coefficient of `centered` is split.

template <Variant kVariant>
struct ApplyFormula {
  static constexpr bool kBackward = true, kRecomputesZ = kVariant == kLeakyOfX;

  template <typename Scalar>
  static SYNCBN_INLINE Coefficients<Scalar> Channel(const ElementwisePass& pass, int64_t c) {
    const double center = CenterOf(pass)[c], scale = PerScale(pass.scale_xmu[c], pass, c);
    const Affine<Scalar> of_centered = MakeAffine<Scalar>(center, scale, pass.shift[c]);
    Affine<Scalar> to_z = {of_centered.center, 0, 0};
    if (kRecomputesZ) to_z = MakeAffine<Scalar>(center, pass.scale[c], pass.offset[c]);
    double unit;
    const Scalar scale_in = Scalar(SplitCoefficient(scale, &unit));
    return {to_z, Scalar(pass.scale[c]), scale_in, Scalar(unit), of_centered.offset};
  }
  template <typename Vector>
  static SYNCBN_INLINE Vector Of(Vector saved, Vector dy, const Coefficients<Vector>& k,
                                 const Slopes<Vector>& f) {
    Vector centered, dz;
    Unwind(kVariant, saved, dy, k.to_z, f, &centered, &dz);
    return k.scale_in * (k.unit * centered) + k.shift + k.scale_dz * dz;
  }
};

MapTile PickApply(const ElementwisePass& pass) {
  return Pick<MapTile, kPlain, kLeakyOfX, kLeakyOfY>(pass, [&](auto variant, auto element) {
    return MapOf<ApplyFormula<variant.value>, decltype(element)>(pass);
  });
}

}  // namespace
}  // namespace syncbn::cpu
