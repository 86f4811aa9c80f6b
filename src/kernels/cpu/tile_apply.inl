// The two passes that write a tensor, for one tile: f(b * (x - mean) + d), or b * u + d + a * dz in
// backward, see activation.inl; plus the old out on request. Forward has backward's struct
// here: t is x, b its scale and d its offset.
// Who includes it: tile_kernels.inl. The output may be one of the inputs (in place).
//
// Arithmetic is float32 (float64 for float64 data). The mean is split into its float32 value and
// the rest, which goes into d: so x - mean loses nothing where the mean is far from zero.

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
  Affine<Value> of;
  Value a, b, d;
};

// The results that the passes compute from an element.
template <Kind kKind>
struct ForwardPass {
  static constexpr bool kBackward = false, kReadsX = false;

  template <typename Vector>
  SYNCBN_INLINE Vector Of(Vector x, Vector /*dy*/, const Coefficients<Vector>& k,
                          const Slopes<Vector>& f) const {
    return Activate<kKind>(k.b * (x - k.of.mean) + k.d, f);
  }
};

template <Kind kKind>
struct BackwardPass {
  static constexpr bool kBackward = true, kReadsX = ReadsX(kKind);

  template <typename Vector>
  SYNCBN_INLINE Vector Of(Vector t, Vector dy, const Coefficients<Vector>& k,
                          const Slopes<Vector>& f) const {
    Vector u, dz;
    Unwind<kKind>(t, dy, k.of, f, &u, &dz);
    return k.b * u + k.d + k.a * dz;
  }
};

template <typename Scalar, typename Pass>
SYNCBN_INLINE Coefficients<Scalar> CoefficientsOf(const Pass&, const ApplyPass& of, int64_t c) {
  Coefficients<Scalar> k = {};
  const double origin = OriginOf(of)[c];
  k.of.mean = Scalar(origin);
  const double lost = origin - double(k.of.mean);
  if (Pass::kReadsX) {
    k.of.scale = Scalar(of.scale[c]);
    k.of.offset = Scalar(of.offset[c] - of.scale[c] * lost);
  }
  if (Pass::kBackward) k.a = Scalar(of.a[c]);
  const double b = UnitOf(of) == nullptr ? of.b[c] : of.b[c] / UnitOf(of)[c];
  k.b = Scalar(b);
  k.d = Scalar(of.d[c] - b * lost);
  return k;
}

template <StoreMode kMode, typename Pass, typename T, typename Vector>
SYNCBN_INLINE void ApplyVector(const Pass& pass, const T* x, const T* dy,
                               const Coefficients<Vector>& k, const Slopes<Vector>& f, T* out) {
  Vector x_vector, dy_vector = {}, old = {};
  Load(x, &x_vector);
  if (Pass::kBackward) Load(dy, &dy_vector);
  if (kMode == StoreMode::kAdd) Load(out, &old);
  const Vector value = pass.Of(x_vector, dy_vector, k, f);
  if constexpr (kMode == StoreMode::kStream)
    Stream(out, value);
  else
    Store(out, kMode == StoreMode::kAdd ? value + old : value);
}

// The first n elements, fewer than a vector. Not inline, which would double every loop's code; by
// value, so that the caller's coefficients stay in registers.
template <StoreMode kMode, typename Pass, typename T, typename Vector>
SYNCBN_NOINLINE void ApplyPart(Pass pass, const T* x, const T* dy, int64_t n,
                               Coefficients<Vector> k, Slopes<Vector> f, T* out) {
  Vector x_vector, dy_vector = {}, old = {};
  LoadPart(x, n, T{}, &x_vector);
  if (Pass::kBackward) LoadPart(dy, n, T{}, &dy_vector);
  if (kMode == StoreMode::kAdd) LoadPart(out, n, T{}, &old);
  const Vector value = pass.Of(x_vector, dy_vector, k, f);
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

template <StoreMode kMode, typename Pass, typename T>
void ApplyPlanes(const Pass& pass, const ApplyPass& of, const Tile& tile) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  const T *const x = static_cast<const T*>(of.t), *const dy = static_cast<const T*>(of.dy);
  T* const out = static_cast<T*>(of.dx);
  const Slopes<Vector> f = MakeSlopes<Vector, Scalar>(of.activation.slope);
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      const Coefficients<Scalar> one = CoefficientsOf<Scalar>(pass, of, c);
      const Vector zero = {};
      const Coefficients<Vector> k = {
          {zero + one.of.mean, zero + one.of.scale, zero + one.of.offset},
          zero + one.a, zero + one.b, zero + one.d};
      const int64_t at = o * tile.row + c * tile.inner;
      int64_t i = at + tile.inner_begin;
      const int64_t end = at + tile.inner_end;
      if constexpr (kMode == StoreMode::kStream) {
        int64_t head = UnalignedHead(out + i);
        if (head > end - i) head = end - i;
        if (head > 0) ApplyPart<kMode>(pass, x + i, dy + i, head, k, f, out + i);
        i += head;
      }
      for (; i + kLanes <= end; i += kLanes)
        ApplyVector<kMode>(pass, x + i, dy + i, k, f, out + i);
      if (i < end) ApplyPart<kMode>(pass, x + i, dy + i, end - i, k, f, out + i);
    }
  }
  if constexpr (kMode == StoreMode::kStream) EndStream();
}

template <typename Scalar, bool kReadsX>
struct ColumnCoefficients {
  static constexpr int64_t kSize = kMaxColumns + kFloats;
  alignas(64) Scalar mean[kSize];
  alignas(64) Scalar a[kSize];
  alignas(64) Scalar b[kSize];
  alignas(64) Scalar d[kSize];
  alignas(64) Scalar scale[kReadsX ? kSize : 1];
  alignas(64) Scalar offset[kReadsX ? kSize : 1];
};

template <StoreMode kMode, typename Pass, typename T, typename Scalar>
void ApplyRow(const Pass& pass, const T* x, const T* dy, int64_t width,
              const ColumnCoefficients<Scalar, Pass::kReadsX>& columns,
              const Slopes<typename Arithmetic<T>::Vector>& f, T* out) {
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  for (int64_t j = 0; j < width; j += kLanes) {
    Coefficients<Vector> k = {};
    Load(columns.mean + j, &k.of.mean);
    if (Pass::kReadsX) Load(columns.scale + j, &k.of.scale);
    if (Pass::kReadsX) Load(columns.offset + j, &k.of.offset);
    if (Pass::kBackward) Load(columns.a + j, &k.a);
    Load(columns.b + j, &k.b);
    Load(columns.d + j, &k.d);
    if (j + kLanes <= width)
      ApplyVector<kMode>(pass, x + j, dy + j, k, f, out + j);
    else
      ApplyPart<kMode>(pass, x + j, dy + j, width - j, k, f, out + j);
  }
}

template <StoreMode kMode, typename Pass, typename T>
void ApplyColumns(const Pass& pass, const ApplyPass& of, const Tile& tile) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  const Rows rows = MakeRows(tile);
  ColumnCoefficients<Scalar, Pass::kReadsX> columns;
  __builtin_memset(&columns, 0, sizeof(columns));
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    const Coefficients<Scalar> k = CoefficientsOf<Scalar>(pass, of, c);
    columns.mean[j] = k.of.mean;
    if (Pass::kReadsX) columns.scale[j] = k.of.scale;
    if (Pass::kReadsX) columns.offset[j] = k.of.offset;
    if (Pass::kBackward) columns.a[j] = k.a;
    columns.b[j] = k.b;
    columns.d[j] = k.d;
  });
  const T *const x = static_cast<const T*>(of.t), *const dy = static_cast<const T*>(of.dy);
  T* const out = static_cast<T*>(of.dx);
  const auto f = MakeSlopes<typename Arithmetic<T>::Vector, Scalar>(of.activation.slope);
  for (int64_t row = 0; row <= rows.count; ++row) {
    const int64_t at = rows.offset + row * rows.stride;
    const int64_t width = row < rows.count ? rows.width : rows.rest;
    ApplyRow<kMode>(pass, x + at, dy + at, width, columns, f, out + at);
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

template <typename Pass>
void ApplyToTile(const Pass& pass, const ApplyPass& of, const Tile& tile, StoreMode mode) {
  const bool add = mode == StoreMode::kAdd;
  WithType(of.dtype, [&](auto element) {
    using T = decltype(element);
    auto run = ApplyPlanes<StoreMode::kAssign, Pass, T>;
    if (add) run = ApplyPlanes<StoreMode::kAdd, Pass, T>;
    if constexpr (kCanStream<T>) {
      if (mode == StoreMode::kStream) run = ApplyPlanes<StoreMode::kStream, Pass, T>;
    }
    if (HasShortPlanes(tile)) {
      run = add ? ApplyColumns<StoreMode::kAdd, Pass, T>
                : ApplyColumns<StoreMode::kAssign, Pass, T>;
      if constexpr (kCanStream<T>) {
        if (mode == StoreMode::kStream && HasAlignedRows(static_cast<T*>(of.dx), tile)) {
          run = ApplyColumns<StoreMode::kStream, Pass, T>;
        }
      }
    }
    run(pass, of, tile);
  });
}

void NormalizeTile(const NormalizePass& pass, const Tile& tile, StoreMode mode) {
  const BackwardInput input = {pass.dtype, pass.layout, pass.x,  pass.x, pass.activation,
                               false,      pass.mean,   nullptr, nullptr};
  const ApplyPass of = {input, nullptr, pass.scale, pass.offset, pass.request, pass.y};
  ForwardKinds::With(KindOf(pass.activation, false), [&](auto kind) {
    ApplyToTile(ForwardPass<kind.value>(), of, tile, mode);
  });
}

void BackwardApplyTile(const ApplyPass& pass, const Tile& tile, StoreMode mode) {
  BackwardKinds::With(KindOf(pass.activation, pass.from_output), [&](auto kind) {
    ApplyToTile(BackwardPass<kind.value>(), pass, tile, mode);
  });
}

}  // namespace
}  // namespace syncbn::cpu
