// The two passes that write a tensor, for one tile: out = b * (x - mean) + d, plus a * dy in
// backward, plus the old out on request.
// Who includes it: tile_kernels.inl. The output may be one of the inputs (in place).
//
// Arithmetic is float32 (float64 for float64 data). The mean is split into its float32 value and
// the rest, which goes into d: so x - mean loses nothing where the mean is far from zero.

namespace syncbn {
namespace cpu {
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
  Value mean, a, b, d;
};

struct PerChannel {
  const double *mean, *a, *b, *d;
};

template <typename Scalar, bool kBackward>
SYNCBN_INLINE Coefficients<Scalar> CoefficientsOf(const PerChannel& of, int64_t c) {
  const Scalar mean = Scalar(of.mean[c]);
  return {mean, kBackward ? Scalar(of.a[c]) : Scalar(0), Scalar(of.b[c]),
          Scalar(of.d[c] - of.b[c] * (of.mean[c] - double(mean)))};
}

template <bool kBackward, bool kAdd, typename Vector>
SYNCBN_INLINE Vector Formula(Vector x, Vector dy, Vector old, const Coefficients<Vector>& k) {
  Vector out = k.b * (x - k.mean) + k.d;
  if (kBackward) out += k.a * dy;
  if (kAdd) out += old;
  return out;
}

template <bool kBackward, bool kAdd, typename T, typename Vector>
SYNCBN_INLINE void ApplyVector(const T* x, const T* dy, const Coefficients<Vector>& k, T* out) {
  Vector x_vector, dy_vector = {}, old = {};
  Load(x, &x_vector);
  if (kBackward) Load(dy, &dy_vector);
  if (kAdd) Load(out, &old);
  Store(out, Formula<kBackward, kAdd>(x_vector, dy_vector, old, k));
}

// The first n elements, fewer than a vector.
template <bool kBackward, bool kAdd, typename T, typename Vector>
SYNCBN_INLINE void ApplyPart(const T* x, const T* dy, int64_t n, const Coefficients<Vector>& k,
                             T* out) {
  Vector x_vector, dy_vector = {}, old = {};
  LoadPart(x, n, T{}, &x_vector);
  if (kBackward) LoadPart(dy, n, T{}, &dy_vector);
  if (kAdd) LoadPart(out, n, T{}, &old);
  T padded[kFloats];
  Store(padded, Formula<kBackward, kAdd>(x_vector, dy_vector, old, k));
  for (int i = 0; i < n; ++i) out[i] = padded[i];
}

template <bool kBackward, bool kAdd, typename T>
void ApplyPlanes(const T* x, const T* dy, const Tile& tile, const PerChannel& of, T* out) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      const Coefficients<Scalar> one = CoefficientsOf<Scalar, kBackward>(of, c);
      const Vector zero = {};
      const Coefficients<Vector> k = {zero + one.mean, zero + one.a, zero + one.b, zero + one.d};
      const int64_t at = o * tile.row + c * tile.inner;
      int64_t i = at + tile.inner_begin;
      const int64_t end = at + tile.inner_end;
      for (; i + kLanes <= end; i += kLanes)
        ApplyVector<kBackward, kAdd>(x + i, dy + i, k, out + i);
      if (i < end) ApplyPart<kBackward, kAdd>(x + i, dy + i, end - i, k, out + i);
    }
  }
}

template <typename Scalar>
struct ColumnCoefficients {
  static constexpr int64_t kSize = kMaxColumns + kFloats;
  alignas(64) Scalar mean[kSize];
  alignas(64) Scalar a[kSize];
  alignas(64) Scalar b[kSize];
  alignas(64) Scalar d[kSize];
};

template <bool kBackward, bool kAdd, typename T, typename Scalar>
void ApplyRow(const T* x, const T* dy, int64_t width, const ColumnCoefficients<Scalar>& columns,
              T* out) {
  typedef typename Arithmetic<T>::Vector Vector;
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(Scalar);
  for (int64_t j = 0; j < width; j += kLanes) {
    Coefficients<Vector> k = {};
    Load(columns.mean + j, &k.mean);
    if (kBackward) Load(columns.a + j, &k.a);
    Load(columns.b + j, &k.b);
    Load(columns.d + j, &k.d);
    if (j + kLanes <= width)
      ApplyVector<kBackward, kAdd>(x + j, dy + j, k, out + j);
    else
      ApplyPart<kBackward, kAdd>(x + j, dy + j, width - j, k, out + j);
  }
}

template <bool kBackward, bool kAdd, typename T>
void ApplyColumns(const T* x, const T* dy, const Tile& tile, const PerChannel& of, T* out) {
  typedef typename Arithmetic<T>::Scalar Scalar;
  const Rows rows = MakeRows(tile);
  ColumnCoefficients<Scalar> columns;
  __builtin_memset(&columns, 0, sizeof(columns));
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    const Coefficients<Scalar> k = CoefficientsOf<Scalar, kBackward>(of, c);
    columns.mean[j] = k.mean;
    if (kBackward) columns.a[j] = k.a;
    columns.b[j] = k.b;
    columns.d[j] = k.d;
  });
  for (int64_t row = 0; row <= rows.count; ++row) {
    const int64_t at = rows.offset + row * rows.stride;
    const int64_t width = row < rows.count ? rows.width : rows.rest;
    ApplyRow<kBackward, kAdd>(x + at, dy + at, width, columns, out + at);
  }
}

template <bool kBackward, bool kAdd, typename T>
void ApplyMode(const T* x, const T* dy, const Tile& tile, const PerChannel& of, T* out) {
  if (HasShortPlanes(tile))
    ApplyColumns<kBackward, kAdd>(x, dy, tile, of, out);
  else
    ApplyPlanes<kBackward, kAdd>(x, dy, tile, of, out);
}

template <typename T>
void ApplyTo(const void* x_data, const void* dy_data, const Tile& tile, const PerChannel& of,
             bool add, void* out_data) {
  const T* x = static_cast<const T*>(x_data);
  T* out = static_cast<T*>(out_data);
  if (dy_data == nullptr)
    return add ? ApplyMode<false, true>(x, x, tile, of, out)
               : ApplyMode<false, false>(x, x, tile, of, out);
  const T* dy = static_cast<const T*>(dy_data);
  return add ? ApplyMode<true, true>(x, dy, tile, of, out)
             : ApplyMode<true, false>(x, dy, tile, of, out);
}

void ApplyToTile(DType dtype, const void* x, const void* dy, const Tile& tile, const double* mean,
                 const double* a, const double* b, const double* d, bool add, void* out) {
  const PerChannel of = {mean, a, b, d};
  switch (dtype) {
    case DType::kFloat32: return ApplyTo<float>(x, dy, tile, of, add, out);
    case DType::kFloat64: return ApplyTo<double>(x, dy, tile, of, add, out);
    case DType::kFloat16: return ApplyTo<Half>(x, dy, tile, of, add, out);
    case DType::kBfloat16: return ApplyTo<Bfloat16>(x, dy, tile, of, add, out);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace syncbn
