// The reductions, which sum two terms u and v of each element for each channel of a tile. All sums
// are float64, because memory, not arithmetic, takes the time.
//
// Members of `Terms`: Channel(c, first) returns the Affine (activation.inl) of channel c, whose
// first element in the tile is `first`. The function Of computes u and v from vectors of x and dy.
// kBackward is true if Of reads dy, and kRecomputesZ if Of computes the activation's input z.

namespace syncbn::cpu {
namespace {

// Fetches ahead of the loads, because a single stream of loads does not keep memory busy.
template <int64_t kSize, typename T>
SYNCBN_INLINE void Prefetch(const T* p) {
  constexpr int64_t kAhead = 1024, kLine = 64;  // bytes
  for (int64_t at = kAhead; at < kAhead + kSize * int64_t(sizeof(T)); at += kLine)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + at);
}

template <typename Value>
struct Pair {
  Value u, v;
};

template <typename Terms, typename T>
SYNCBN_INLINE void AddVector(const Terms& terms, const T* x, const T* dy, const Affine<Doubles>& k,
                             Pair<Doubles>* sums) {
  Doubles x_vector, dy_vector = {};
  Load(x, &x_vector);
  if (Terms::kBackward) Load(dy, &dy_vector);
  Doubles u, v;
  terms.Of(x_vector, dy_vector, k, &u, &v);
  sums->u += u;
  sums->v += v;
}

// Returns u and v of n elements, fewer than a vector has. The other elements of the vectors are
// `fill` in x and 0 in dy. In SumPlane their u and v are 0, and AddColumns does not store them.
// Inlining would double the code of every loop. Arguments passed by value can stay in registers.
template <typename Terms, typename T>
SYNCBN_NOINLINE Pair<Doubles> TermsOfPart(Terms terms, const T* x, const T* dy, int64_t n, T fill,
                                          Affine<Doubles> k) {
  Doubles x_vector, dy_vector = {};
  LoadPart(x, n, fill, &x_vector);
  if (Terms::kBackward) LoadPart(dy, n, T{}, &dy_vector);
  Pair<Doubles> part;
  terms.Of(x_vector, dy_vector, k, &part.u, &part.v);
  return part;
}

template <typename Terms, typename T>
SYNCBN_INLINE void AddPart(const Terms& terms, const T* x, const T* dy, int64_t n, T fill,
                           const Affine<Doubles>& k, Pair<Doubles>* sums) {
  const Pair<Doubles> part = TermsOfPart(terms, x, dy, n, fill, k);
  sums->u += part.u;
  sums->v += part.v;
}

SYNCBN_INLINE double Sum(Doubles v) {
  double sum = 0;
  for (int i = 0; i < kDoubles; ++i) sum += v[i];
  return sum;
}

template <typename Terms, typename T>
inline Pair<double> SumPlane(const Terms& terms, const T* x, const T* dy, int64_t n, T first,
                             const Affine<double>& channel) {
  constexpr int kUnroll = 4;  // independent chains of additions
  Pair<Doubles> s[kUnroll] = {};
  const Doubles zero = {};
  const Affine<Doubles> k = {zero + channel.center, zero + channel.scale, zero + channel.offset};
  int64_t i = 0;
  for (; i + kUnroll * kDoubles <= n; i += kUnroll * kDoubles) {
    Prefetch<kUnroll * kDoubles>(x + i);
    if (Terms::kBackward) Prefetch<kUnroll * kDoubles>(dy + i);
    for (int part = 0; part < kUnroll; ++part) {
      const int64_t at = i + part * kDoubles;
      AddVector(terms, x + at, dy + at, k, &s[part]);
    }
  }
  for (; i + kDoubles <= n; i += kDoubles) AddVector(terms, x + i, dy + i, k, &s[0]);
  if (i < n) AddPart(terms, x + i, dy + i, n - i, first, k, &s[1]);
  return {Sum((s[0].u + s[1].u) + (s[2].u + s[3].u)), Sum((s[0].v + s[1].v) + (s[2].v + s[3].v))};
}

template <typename Terms, typename T>
void SumPlanes(const Terms& terms, const T* x, const T* dy, const Tile& tile, double* sum_u,
               double* sum_v) {
  const int64_t n = tile.inner_end - tile.inner_begin;
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
      const int64_t at = o * tile.row + c * tile.inner + tile.inner_begin;
      const T first = FirstOf(x, tile, c);
      const Pair<double> sums = SumPlane(terms, x + at, dy + at, n, first, terms.Channel(c, first));
      sum_u[c] += sums.u;
      sum_v[c] += sums.v;
    }
  }
}

// The Affine and the two sums of each column of `Rows` (tile.inl), padded to whole vectors.
template <bool kRecomputesZ>
struct ColumnSums {
  static constexpr int64_t kSize = kMaxColumns + kDoubles;
  alignas(64) double center[kSize];
  alignas(64) double u[kSize];
  alignas(64) double v[kSize];
  alignas(64) double scale[kRecomputesZ ? kSize : 1];
  alignas(64) double offset[kRecomputesZ ? kSize : 1];
};

// Adds kRows rows of `n` columns from column j on, and loads and stores the sums only once.
template <int kRows, bool kFull, typename Terms, typename T>
SYNCBN_INLINE void AddColumns(const Terms& terms, const T* x, const T* dy, int64_t stride,
                              int64_t j, int64_t n, ColumnSums<Terms::kRecomputesZ>* columns) {
  Affine<Doubles> k = {};
  Pair<Doubles> sums;
  Load(columns->center + j, &k.center);
  if (Terms::kRecomputesZ) Load(columns->scale + j, &k.scale);
  if (Terms::kRecomputesZ) Load(columns->offset + j, &k.offset);
  Load(columns->u + j, &sums.u);
  Load(columns->v + j, &sums.v);
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = row * stride + j;
    if (kFull)
      AddVector(terms, x + at, dy + at, k, &sums);
    else
      AddPart(terms, x + at, dy + at, n, T{}, k, &sums);
  }
  if (kFull) {
    Store(columns->u + j, sums.u);
    Store(columns->v + j, sums.v);
  } else {  // elements behind the n-th must not change: they may be sums of earlier, longer rows
    for (int64_t i = 0; i < n; ++i) {
      columns->u[j + i] = sums.u[i];
      columns->v[j + i] = sums.v[i];
    }
  }
}

template <int kRows, typename Terms, typename T>
void AddRows(const Terms& terms, const T* x, const T* dy, int64_t stride, int64_t width,
             ColumnSums<Terms::kRecomputesZ>* columns) {
  int64_t j = 0;
  for (; j + kDoubles <= width; j += kDoubles)
    AddColumns<kRows, true>(terms, x, dy, stride, j, kDoubles, columns);
  if (j < width) AddColumns<kRows, false>(terms, x, dy, stride, j, width - j, columns);
}

template <typename Terms, typename T>
void SumColumns(const Terms& terms, const T* x, const T* dy, const Tile& tile, double* sum_u,
                double* sum_v) {
  const Rows rows = MakeRows(tile);
  const T* const firsts = x + tile.outer_begin * tile.row;
  ColumnSums<Terms::kRecomputesZ> columns;
  __builtin_memset(&columns, 0, sizeof(columns));
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    const Affine<double> k = terms.Channel(c, firsts[c * tile.inner]);
    columns.center[j] = k.center;
    if (Terms::kRecomputesZ) columns.scale[j] = k.scale;
    if (Terms::kRecomputesZ) columns.offset[j] = k.offset;
  });
  constexpr int kRows = 8;
  x += rows.offset;
  dy += rows.offset;
  int64_t row = 0;
  for (; row + kRows <= rows.count; row += kRows) {
    AddRows<kRows>(terms, x, dy, rows.stride, rows.width, &columns);
    x += kRows * rows.stride;
    dy += kRows * rows.stride;
  }
  for (; row < rows.count; ++row) {
    AddRows<1>(terms, x, dy, 0, rows.width, &columns);
    x += rows.stride;
    dy += rows.stride;
  }
  AddRows<1>(terms, x, dy, 0, rows.rest, &columns);
  ForEachColumn(rows, tile, [&](int64_t j, int64_t c) {
    sum_u[c] += columns.u[j];
    sum_v[c] += columns.v[j];
  });
}

// SumColumns has longer loops than SumPlanes, which saves time, but also adds the sums of each
// column to a channel, which costs time. If there are few rows, it costs more than it saves.
inline bool PrefersColumns(const Tile& tile) {
  return tile.inner < kMinPlane && (tile.inner < 16 || tile.outer_end - tile.outer_begin >= 16);
}

// Sums a tile that is one block of kGroups vectors.
template <int kGroups, typename Terms, typename T>
void SumBlock(const Terms& terms, const T* x, const T* dy, const Tile& tile, double* sum_u,
              double* sum_v) {
  constexpr int kUnroll = kGroups <= 2 ? 4 / kGroups : 1;  // independent chains of additions
  constexpr int64_t kBlock = kGroups * kDoubles;
  Affine<Doubles> k[kGroups];
  Pair<Doubles> s[kGroups][kUnroll] = {};
  for (int64_t i = 0; i < kBlock; ++i) {
    const int64_t c = tile.channel_begin + i;
    const Affine<double> one = terms.Channel(c, FirstOf(x, tile, c));
    k[i / kDoubles].center[i % kDoubles] = one.center;
    k[i / kDoubles].scale[i % kDoubles] = one.scale;
    k[i / kDoubles].offset[i % kDoubles] = one.offset;
  }
  const int64_t pixels = tile.inner_end - tile.inner_begin;
  const auto add = [&](int64_t at, int chain) {
    for (int g = 0; g < kGroups; ++g) {
      AddVector(terms, x + at + g * kDoubles, dy + at + g * kDoubles, k[g], &s[g][chain]);
    }
  };
  for (int64_t o = tile.outer_begin; o < tile.outer_end; ++o) {
    int64_t at = o * tile.row + tile.channel_begin * tile.inner + tile.inner_begin * kBlock;
    int64_t pixel = 0;
    for (; pixel + kUnroll <= pixels; pixel += kUnroll, at += kUnroll * kBlock) {
      Prefetch<kUnroll * kBlock>(x + at);
      if (Terms::kBackward) Prefetch<kUnroll * kBlock>(dy + at);
      for (int chain = 0; chain < kUnroll; ++chain) add(at + chain * kBlock, chain);
    }
    for (; pixel < pixels; ++pixel, at += kBlock) add(at, 0);
  }
  for (int64_t i = 0; i < kBlock; ++i) {
    for (const Pair<Doubles>& chain : s[i / kDoubles]) {
      sum_u[tile.channel_begin + i] += chain.u[i % kDoubles];
      sum_v[tile.channel_begin + i] += chain.v[i % kDoubles];
    }
  }
}

template <typename Terms, typename T>
void SumTile(const Terms& terms, const T* x, const T* dy, const Tile& tile, double* sum_u,
             double* sum_v) {
  if constexpr (kCanBlock<T>) {
    if (tile.block == 8) return SumBlock<8 / kDoubles>(terms, x, dy, tile, sum_u, sum_v);
    if (tile.block == 16) return SumBlock<16 / kDoubles>(terms, x, dy, tile, sum_u, sum_v);
  }
  if (PrefersColumns(tile))
    SumColumns(terms, x, dy, tile, sum_u, sum_v);
  else
    SumPlanes(terms, x, dy, tile, sum_u, sum_v);
}

// ---- the first pass of forward: mean and m2 = sum((x - mean)^2) --------------------------------
//
//   u = x - first,  mean = first + sum(u) / n,  m2 = sum(u * u) - sum(u)^2 / n
//
// `first` is the first of the channel's n elements in the tile. It is within sqrt(m2 * (n - 1) / n)
// of the mean, so m2 loses at most a factor of about n in precision, whatever the mean is.

struct MomentTerms {
  static constexpr bool kBackward = false, kRecomputesZ = false;

  template <typename T>
  SYNCBN_INLINE Affine<double> Channel(int64_t /*c*/, T first) const {
    return {ToDouble(first), 0, 0};
  }
  SYNCBN_INLINE void Of(Doubles x, Doubles /*dy*/, const Affine<Doubles>& k, Doubles* u,
                        Doubles* v) const {
    *u = x - k.center;
    *v = *u * *u;
  }
};

template <typename T>
void MomentsOfTile(const ReductionPass& pass, const Tile& tile, double* mean, double* m2) {
  const T* x = static_cast<const T*>(pass.in);
  SumTile(MomentTerms(), x, x, tile, mean, m2);
  const double n =
      double((tile.outer_end - tile.outer_begin) * (tile.inner_end - tile.inner_begin));
  for (int64_t c = tile.channel_begin; c < tile.channel_end; ++c) {
    const double sum = mean[c];
    const double rest = m2[c] - sum * (sum / n);
    mean[c] = ToDouble(FirstOf(x, tile, c)) + sum / n;
    m2[c] = rest < 0 ? 0 : rest;  // NaN stays NaN
  }
}

ReduceTile PickMoments(const ReductionPass& pass) {
  return Pick<ReduceTile, kPlain, kLeakyOfX>(
      pass, [](auto /*variant*/, auto element) { return MomentsOfTile<decltype(element)>; });
}

// ---- the first pass of backward: the sums of dz and of dz * centered ---------------------------

template <Variant kVariant>
struct GradientTerms {
  static constexpr bool kBackward = true, kRecomputesZ = kVariant == kLeakyOfX;
  const double *center, *scale, *offset;
  Slopes<Doubles> f;

  template <typename T>
  SYNCBN_INLINE Affine<double> Channel(int64_t c, T /*first*/) const {
    return {center[c], kRecomputesZ ? scale[c] : 0, kRecomputesZ ? offset[c] : 0};
  }
  SYNCBN_INLINE void Of(Doubles saved, Doubles dy, const Affine<Doubles>& k, Doubles* u,
                        Doubles* v) const {
    Doubles centered;
    Unwind(kVariant, saved, dy, k, f, &centered, u);
    *v = *u * centered;
  }
};

template <typename T, Variant kVariant>
void SumsOfTile(const ReductionPass& pass, const Tile& tile, double* sum_dz,
                double* sum_dz_centered) {
  const GradientTerms<kVariant> terms = {CenterOf(pass), pass.scale, pass.offset,
                                         MakeSlopes<Doubles, double>(pass.activation.slope)};
  SumTile(terms, static_cast<const T*>(pass.in), static_cast<const T*>(pass.dy), tile, sum_dz,
          sum_dz_centered);
}

ReduceTile PickSums(const ReductionPass& pass) {
  return Pick<ReduceTile, kPlain, kLeakyOfX, kLeakyOfY>(pass, [](auto variant, auto element) {
    return SumsOfTile<decltype(element), variant.value>;
  });
}

}  // namespace
}  // namespace syncbn::cpu
