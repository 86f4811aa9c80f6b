// The two reductions, of one tile: sums of (d, d * d) or of (dy, dy * d), where d = x - k[c].
// Who includes it: tile_kernels.inl. Sums are float64 at once: memory is still what takes the time.
//
// For moments k is the channel's first value in the tile. Being one of the values, it is within
// sqrt(m2 * n / (n - 1)) of their mean, so m2 = sum d^2 - (sum d)^2 / n loses at most a factor of
// about n, the elements of one tile, whatever the mean.

namespace syncbn {
namespace cpu {
namespace {

template <bool kBackward>
SYNCBN_INLINE void Add(Doubles x, Doubles dy, Doubles k, Doubles* u, Doubles* v) {
  const Doubles d = x - k;
  const Doubles factor = kBackward ? dy : d;
  *u += factor;
  *v += factor * d;
}

template <bool kBackward, typename T>
SYNCBN_INLINE void AddVector(const T* x, const T* dy, Doubles k, Doubles* u, Doubles* v) {
  Doubles x_vector, dy_vector = {};
  Load(x, &x_vector);
  if (kBackward) Load(dy, &dy_vector);
  Add<kBackward>(x_vector, dy_vector, k, u, v);
}

// The lanes past n add zero where k is `fill`, or else where dy is 0; or the caller ignores them.
template <bool kBackward, typename T>
SYNCBN_INLINE void AddPart(const T* x, const T* dy, int64_t n, T fill, Doubles k, Doubles* u,
                           Doubles* v) {
  Doubles x_vector, dy_vector = {};
  LoadPart(x, n, fill, &x_vector);
  if (kBackward) LoadPart(dy, n, T{}, &dy_vector);
  Add<kBackward>(x_vector, dy_vector, k, u, v);
}

SYNCBN_INLINE double Sum(Doubles v) {
  double sum = 0;
  for (int i = 0; i < kDoubles; ++i) sum += v[i];
  return sum;
}

template <bool kBackward, typename T>
inline void SumPlane(const T* x, const T* dy, int64_t n, T first, double shift, double* sum_u,
                     double* sum_v) {
  constexpr int kUnroll = 4;  // chains of additions side by side
  Doubles u[kUnroll] = {}, v[kUnroll] = {};
  const Doubles k = Doubles{} + shift;
  int64_t i = 0;
  for (; i + kUnroll * kDoubles <= n; i += kUnroll * kDoubles) {
    for (int part = 0; part < kUnroll; ++part) {
      const int64_t at = i + part * kDoubles;
      AddVector<kBackward>(x + at, dy + at, k, &u[part], &v[part]);
    }
  }
  for (; i + kDoubles <= n; i += kDoubles) AddVector<kBackward>(x + i, dy + i, k, &u[0], &v[0]);
  if (i < n) AddPart<kBackward>(x + i, dy + i, n - i, first, k, &u[1], &v[1]);
  *sum_u += Sum((u[0] + u[1]) + (u[2] + u[3]));
  *sum_v += Sum((v[0] + v[1]) + (v[2] + v[3]));
}

template <bool kBackward, typename T>
void SumPlanes(const T* x, const T* dy, const Tile& tile, const double* mean, double* sum_u,
               double* sum_v) {
  const T* firsts = FirstOf(x, tile);
  const int64_t n = tile.inner_end - tile.inner_begin;
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      const int64_t at = o * tile.row + c * tile.inner + tile.inner_begin;
      const T first = firsts[c * tile.inner];
      const double shift = kBackward ? mean[c] : ToDouble(first);
      SumPlane<kBackward>(x + at, dy + at, n, first, shift, &sum_u[c], &sum_v[c]);
    }
  }
}

// The sums of one row; padded, so that the last vector can be loaded whole.
struct Columns {
  alignas(64) double k[kMaxColumns + kDoubles];
  alignas(64) double u[kMaxColumns + kDoubles];
  alignas(64) double v[kMaxColumns + kDoubles];
};

// Adds `n` columns from j on, in several rows at a time to load and store the sums less often.
template <int kRows, bool kWhole, bool kBackward, typename T>
SYNCBN_INLINE void AddColumns(const T* x, const T* dy, int64_t stride, int64_t j, int64_t n,
                              Columns* columns) {
  Doubles k, u, v;
  Load(columns->k + j, &k);
  Load(columns->u + j, &u);
  Load(columns->v + j, &v);
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = row * stride + j;
    if (kWhole)
      AddVector<kBackward>(x + at, dy + at, k, &u, &v);
    else
      AddPart<kBackward>(x + at, dy + at, n, T{}, k, &u, &v);
  }
  if (kWhole) {
    Store(columns->u + j, u);
    Store(columns->v + j, v);
  } else {  // a shorter last row: the other lanes hold columns of the longer ones
    for (int64_t i = 0; i < n; ++i) {
      columns->u[j + i] = u[i];
      columns->v[j + i] = v[i];
    }
  }
}

template <int kRows, bool kBackward, typename T>
void AddRows(const T* x, const T* dy, int64_t stride, int64_t width, Columns* columns) {
  int64_t j = 0;
  for (; j + kDoubles <= width; j += kDoubles)
    AddColumns<kRows, true, kBackward>(x, dy, stride, j, kDoubles, columns);
  if (j < width) AddColumns<kRows, false, kBackward>(x, dy, stride, j, width - j, columns);
}

template <bool kBackward, typename T>
void SumColumns(const T* x, const T* dy, const Tile& tile, const double* mean, double* sum_u,
                double* sum_v) {
  const Rows rows = MakeRows(tile);
  const T* firsts = FirstOf(x, tile);
  Columns columns;
  __builtin_memset(&columns, 0, sizeof(columns));
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    columns.k[j] = kBackward ? mean[c] : ToDouble(firsts[c * tile.inner]);
  });
  constexpr int kRows = 8;
  x += rows.offset;
  dy += rows.offset;
  int64_t row = 0;
  for (; row + kRows <= rows.count; row += kRows) {
    AddRows<kRows, kBackward>(x, dy, rows.stride, rows.width, &columns);
    x += kRows * rows.stride;
    dy += kRows * rows.stride;
  }
  for (; row < rows.count; ++row) {
    AddRows<1, kBackward>(x, dy, 0, rows.width, &columns);
    x += rows.stride;
    dy += rows.stride;
  }
  AddRows<1, kBackward>(x, dy, 0, rows.rest, &columns);
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    sum_u[c] += columns.u[j];
    sum_v[c] += columns.v[j];
  });
}

template <bool kBackward, typename T>
void SumTile(const T* x, const T* dy, const Tile& tile, const double* mean, double* sum_u,
             double* sum_v) {
  for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) sum_u[c] = sum_v[c] = 0;
  if (HasShortPlanes(tile))
    SumColumns<kBackward>(x, dy, tile, mean, sum_u, sum_v);
  else
    SumPlanes<kBackward>(x, dy, tile, mean, sum_u, sum_v);
}

template <typename T>
void LocalMomentsOf(const void* x_data, const Tile& tile, double* mean, double* m2) {
  const T* x = static_cast<const T*>(x_data);
  SumTile<false>(x, x, tile, nullptr, mean, m2);
  const T* firsts = FirstOf(x, tile);
  const double n = double((tile.outer_end - tile.outer_begin) *
                          (tile.inner_end - tile.inner_begin));
  for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
    const double sum = mean[c];
    const double rest = m2[c] - sum * (sum / n);
    mean[c] = ToDouble(firsts[c * tile.inner]) + sum / n;
    m2[c] = rest < 0 ? 0 : rest;  // a NaN stays one
  }
}

void LocalMomentsOfTile(DType dtype, const void* x, const Tile& tile, double* mean, double* m2) {
  switch (dtype) {
    case DType::kFloat32: return LocalMomentsOf<float>(x, tile, mean, m2);
    case DType::kFloat64: return LocalMomentsOf<double>(x, tile, mean, m2);
    case DType::kFloat16: return LocalMomentsOf<Half>(x, tile, mean, m2);
    case DType::kBfloat16: return LocalMomentsOf<Bfloat16>(x, tile, mean, m2);
  }
}

template <typename T>
void BackwardSumsOf(const void* x, const void* dy, const Tile& tile, const double* mean,
                    double* sum_dy, double* sum_dy_xmu) {
  SumTile<true>(static_cast<const T*>(x), static_cast<const T*>(dy), tile, mean, sum_dy,
                sum_dy_xmu);
}

void BackwardSumsOfTile(DType dtype, const void* x, const void* dy, const Tile& tile,
                        const double* mean, double* sum_dy, double* sum_dy_xmu) {
  switch (dtype) {
    case DType::kFloat32: return BackwardSumsOf<float>(x, dy, tile, mean, sum_dy, sum_dy_xmu);
    case DType::kFloat64: return BackwardSumsOf<double>(x, dy, tile, mean, sum_dy, sum_dy_xmu);
    case DType::kFloat16: return BackwardSumsOf<Half>(x, dy, tile, mean, sum_dy, sum_dy_xmu);
    case DType::kBfloat16: return BackwardSumsOf<Bfloat16>(x, dy, tile, mean, sum_dy, sum_dy_xmu);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace syncbn
