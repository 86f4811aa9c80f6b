// The two passes that write a tensor, for one tile, see ElementwisePass; plus the old out where it is
// added to. Forward is f(scale_in * centered + shift), and backward
// scale_in * (unit * centered) + shift + scale_dz * dz; activation.inl defines `centered` and unit.
// Who includes it: tile_kernels.inl. The output may be one of the inputs (in place).
//
// Arithmetic is float32 (float64 for float64 data).

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

// Scalars of one channel, or vectors over as many columns.
template <typename Value>
struct Coefficients {
  Affine<Value> to_z;  // its center is that of both passes
  Value scale_dz, scale_in, unit, shift;
};

// The results that the passes compute from an element.
template <Variant kVariant>
struct ForwardFormula {
  static constexpr bool kBackward = false, kReadsX = false;

  template <typename Vector>
  SYNCBN_INLINE Vector Of(Vector x, Vector /*dy*/, const Coefficients<Vector>& k,
                          const Slopes<Vector>& f) const {
    return Activate<kVariant>(k.scale_in * (x - k.to_z.center) + k.shift, f);
  }
};

template <Variant kVariant>
struct BackwardFormula {
  static constexpr bool kBackward = true, kReadsX = ReadsX(kVariant);

  template <typename Vector>
  SYNCBN_INLINE Vector Of(Vector saved, Vector dy, const Coefficients<Vector>& k,
                          const Slopes<Vector>& f) const {
    Vector centered, dz;
    Unwind<kVariant>(saved, dy, k.to_z, f, &centered, &dz);
    return k.scale_in * (k.unit * centered) + k.shift + k.scale_dz * dz;
  }
};

template <typename Scalar, typename Formula>
SYNCBN_INLINE Coefficients<Scalar> CoefficientsOf(const Formula&, const ElementwisePass& pass,
                                                  int64_t c) {
  Coefficients<Scalar> k = {};
  Affine<Scalar> of_in;
  if (Formula::kBackward) {
    const double center = CenterOf(pass)[c], *const divisors = ScaleOfCentered(pass);
    const double scale = divisors == nullptr ? pass.scale_xmu[c] : pass.scale_xmu[c] / divisors[c];
    of_in = MakeAffine<Scalar>(center, scale, pass.shift[c]);
    double unit;
    of_in.scale = Scalar(SplitCoefficient(scale, &unit));
    k.unit = Scalar(unit);
    if (Formula::kReadsX) k.to_z = MakeAffine<Scalar>(center, pass.scale[c], pass.offset[c]);
    k.scale_dz = Scalar(pass.scale[c]);
  } else {
    of_in = MakeAffine<Scalar>(pass.mean[c], pass.scale[c], pass.offset[c]);
  }
  k.to_z.center = of_in.center;
  k.scale_in = of_in.scale;
  k.shift = of_in.offset;
  return k;
}

template <StoreMode kMode, typename Formula, typename T, typename Vector>
SYNCBN_INLINE void ApplyVector(const Formula& formula, const T* x, const T* dy,
                               const Coefficients<Vector>& k, const Slopes<Vector>& f, T* out) {
  Vector x_vector, dy_vector = {}, old = {};
  Load(x, &x_vector);
  if (Formula::kBackward) Load(dy, &dy_vector);
  if (kMode == StoreMode::kAdd) Load(out, &old);
  const Vector value = formula.Of(x_vector, dy_vector, k, f);
  if constexpr (kMode == StoreMode::kStream)
    Stream(out, value);
  else
    Store(out, kMode == StoreMode::kAdd ? value + old : value);
}

// The first n elements, fewer than a vector. Not inline, which would double every loop's code; by
// value, so that the caller's coefficients stay in registers.
template <StoreMode kMode, typename Formula, typename T, typename Vector>
SYNCBN_NOINLINE void ApplyPart(Formula formula, const T* x, const T* dy, int64_t n,
                               Coefficients<Vector> k, Slopes<Vector> f, T* out) {
  Vector x_vector, dy_vector = {}, old = {};
  LoadPart(x, n, T{}, &x_vector);
  if (Formula::kBackward) LoadPart(dy, n, T{}, &dy_vector);
  if (kMode == StoreMode::kAdd) LoadPart(out, n, T{}, &old);
  const Vector value = formula.Of(x_vector, dy_vector, k, f);
  T padded[kFloats];
  Store(padded, kMode == StoreMode::kAdd ? value + old : value);
  for (int i = 0; i < n; ++i) out[i] = padded[i];
}

// The elements from p on, fewer than a vector, before the next address that can be streamed to.
template <typename T>
SYNCBN_INLINE int64_t UnalignedHead(const T* p) {
  const int64_t beyond = int64_t(reinterpret_cast<uintptr_t>(p) % kVectorBytes);
  return beyond == 0 ? 0 : (kVectorBytes - beyond) / int64_t(sizeof(T));
}

template <StoreMode kMode, typename Formula, typename T>
void ApplyPlanes(const Formula& formula, const ElementwisePass& pass, const Tile& tile) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  const T *const x = static_cast<const T*>(pass.in), *const dy = static_cast<const T*>(pass.dy);
  T* const out = static_cast<T*>(pass.out);
  const Slopes<Vector> f = MakeSlopes<Vector, Scalar>(pass.activation.slope);
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      const Coefficients<Scalar> one = CoefficientsOf<Scalar>(formula, pass, c);
      const Vector zero = {};
      const Coefficients<Vector> k = {
          {zero + one.to_z.center, zero + one.to_z.scale, zero + one.to_z.offset},
          zero + one.scale_dz, zero + one.scale_in, zero + one.unit, zero + one.shift};
      const int64_t at = o * tile.row + c * tile.inner;
      int64_t i = at + tile.inner_begin;
      const int64_t end = at + tile.inner_end;
      if constexpr (kMode == StoreMode::kStream) {
        int64_t head = UnalignedHead(out + i);
        if (head > end - i) head = end - i;
        if (head > 0) ApplyPart<kMode>(formula, x + i, dy + i, head, k, f, out + i);
        i += head;
      }
      for (; i + kLanes <= end; i += kLanes)
        ApplyVector<kMode>(formula, x + i, dy + i, k, f, out + i);
      if (i < end) ApplyPart<kMode>(formula, x + i, dy + i, end - i, k, f, out + i);
    }
  }
  if constexpr (kMode == StoreMode::kStream) EndStream();
}

template <typename Scalar, bool kReadsX>
struct ColumnCoefficients {
  static constexpr int64_t kSize = kMaxColumns + kFloats;
  alignas(64) Scalar center[kSize];
  alignas(64) Scalar scale_dz[kSize];
  alignas(64) Scalar scale_in[kSize];
  alignas(64) Scalar unit[kSize];
  alignas(64) Scalar shift[kSize];
  alignas(64) Scalar to_z_scale[kReadsX ? kSize : 1];
  alignas(64) Scalar to_z_offset[kReadsX ? kSize : 1];
};

template <StoreMode kMode, typename Formula, typename T, typename Scalar>
void ApplyRow(const Formula& formula, const T* x, const T* dy, int64_t width,
              const ColumnCoefficients<Scalar, Formula::kReadsX>& columns,
              const Slopes<typename Arithmetic<T>::Vector>& f, T* out) {
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  for (int64_t j = 0; j < width; j += kLanes) {
    Coefficients<Vector> k = {};
    Load(columns.center + j, &k.to_z.center);
    if (Formula::kReadsX) Load(columns.to_z_scale + j, &k.to_z.scale);
    if (Formula::kReadsX) Load(columns.to_z_offset + j, &k.to_z.offset);
    if (Formula::kBackward) Load(columns.scale_dz + j, &k.scale_dz);
    Load(columns.scale_in + j, &k.scale_in);
    if (Formula::kBackward) Load(columns.unit + j, &k.unit);
    Load(columns.shift + j, &k.shift);
    if (j + kLanes <= width)
      ApplyVector<kMode>(formula, x + j, dy + j, k, f, out + j);
    else
      ApplyPart<kMode>(formula, x + j, dy + j, width - j, k, f, out + j);
  }
}

template <StoreMode kMode, typename Formula, typename T>
void ApplyColumns(const Formula& formula, const ElementwisePass& pass, const Tile& tile) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  const Rows rows = MakeRows(tile);
  ColumnCoefficients<Scalar, Formula::kReadsX> columns;
  __builtin_memset(&columns, 0, sizeof(columns));
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    const Coefficients<Scalar> k = CoefficientsOf<Scalar>(formula, pass, c);
    columns.center[j] = k.to_z.center;
    if (Formula::kReadsX) columns.to_z_scale[j] = k.to_z.scale;
    if (Formula::kReadsX) columns.to_z_offset[j] = k.to_z.offset;
    if (Formula::kBackward) columns.scale_dz[j] = k.scale_dz;
    columns.scale_in[j] = k.scale_in;
    if (Formula::kBackward) columns.unit[j] = k.unit;
    columns.shift[j] = k.shift;
  });
  const T *const x = static_cast<const T*>(pass.in), *const dy = static_cast<const T*>(pass.dy);
  T* const out = static_cast<T*>(pass.out);
  const auto f = MakeSlopes<typename Arithmetic<T>::Vector, Scalar>(pass.activation.slope);
  for (int64_t row = 0; row <= rows.count; ++row) {
    const int64_t at = rows.offset + row * rows.stride;
    const int64_t width = row < rows.count ? rows.width : rows.rest;
    ApplyRow<kMode>(formula, x + at, dy + at, width, columns, f, out + at);
  }
  if constexpr (kMode == StoreMode::kStream) EndStream();
}

// True if all vectors of the tile's rows begin at addresses that can be streamed to.
template <typename T>
bool HasAlignedRows(const T* out, const Tile& tile) {
  const Rows rows = MakeRows(tile);
  out += rows.offset;
  return UnalignedHead(out) == 0 && UnalignedHead(out + rows.stride) == 0;
}

template <typename Formula>
void ApplyToTile(const Formula& formula, const ElementwisePass& pass, const Tile& tile, StoreMode mode) {
  const bool add = mode == StoreMode::kAdd;
  WithType(pass.dtype, [&](auto element) {
    using T = decltype(element);
    auto run = ApplyPlanes<StoreMode::kAssign, Formula, T>;
    if (add) run = ApplyPlanes<StoreMode::kAdd, Formula, T>;
    if constexpr (kCanStream<T>) {
      if (mode == StoreMode::kStream) run = ApplyPlanes<StoreMode::kStream, Formula, T>;
    }
    if (HasShortPlanes(tile)) {
      run = add ? ApplyColumns<StoreMode::kAdd, Formula, T>
                : ApplyColumns<StoreMode::kAssign, Formula, T>;
      if constexpr (kCanStream<T>) {
        if (mode == StoreMode::kStream && HasAlignedRows(static_cast<T*>(pass.out), tile)) {
          run = ApplyColumns<StoreMode::kStream, Formula, T>;
        }
      }
    }
    run(formula, pass, tile);
  });
}

void NormalizeTile(const ElementwisePass& pass, const Tile& tile, StoreMode mode) {
  ForwardVariants::With(VariantOf(pass.activation, false), [&](auto variant) {
    ApplyToTile(ForwardFormula<variant.value>(), pass, tile, mode);
  });
}

void BackwardApplyTile(const ElementwisePass& pass, const Tile& tile, StoreMode mode) {
  BackwardVariants::With(VariantOf(pass.activation, pass.from_output), [&](auto variant) {
    ApplyToTile(BackwardFormula<variant.value>(), pass, tile, mode);
  });
}

}  // namespace
}  // namespace syncbn::cpu
