// The activation, forward and backward, for a vector of elements.
// Who includes it: tile_kernels.inl. Nothing here knows memory layouts.

namespace syncbn {
namespace cpu {
namespace {

// What a pass does with the element t that it reads; names the instances of the kernels.
enum Kind {
  kPlain,      // no activation; a backward pass reads x, or y of the identity
  kLeakyOfX,   // forward, or backward from x
  kLeakyOfY,   // backward from y
  kEluOfX,     // forward, or backward from x
  kEluOfY,     // backward from y
};

constexpr bool ReadsX(Kind kind) { return kind == kLeakyOfX || kind == kEluOfX; }

inline Kind KindOf(const Activation& activation, bool from_output) {
  if (activation.function == Function::kElu) return from_output ? kEluOfY : kEluOfX;
  if (activation.function != Function::kLeakyRelu) return kPlain;
  return from_output ? kLeakyOfY : kLeakyOfX;
}

// Calls run(constant of kind); how a kind at run time becomes a template argument.
template <Kind kKind>
struct KindConstant {
  static constexpr Kind value = kKind;
};
template <typename Run>
SYNCBN_INLINE void WithKind(const Activation& activation, bool from_output, const Run& run) {
  switch (KindOf(activation, from_output)) {
    case kPlain: return run(KindConstant<kPlain>());
    case kLeakyOfX: return run(KindConstant<kLeakyOfX>());
    case kLeakyOfY: return run(KindConstant<kLeakyOfY>());
    case kEluOfX: return run(KindConstant<kEluOfX>());
    case kEluOfY: return run(KindConstant<kEluOfY>());
  }
}

// Scalars of one channel, or vectors over as many columns; `scale` and `offset` lead from x to z.
template <typename Value>
struct Affine {
  Value mean, scale, offset;
};

template <typename Vector>
struct Slopes {
  Vector slope, inverse;
};

template <typename Vector, typename Scalar>
SYNCBN_INLINE Slopes<Vector> MakeSlopes(double slope) {
  return {Vector{} + Scalar(slope), Vector{} + Scalar(1 / slope)};
}

SYNCBN_INLINE float Exp(float z) { return __builtin_expf(z); }
SYNCBN_INLINE double Exp(double z) { return __builtin_exp(z); }
SYNCBN_INLINE float Expm1(float z) { return __builtin_expm1f(z); }
SYNCBN_INLINE double Expm1(double z) { return __builtin_expm1(z); }
SYNCBN_INLINE float Log1p(float y) { return __builtin_log1pf(y); }
SYNCBN_INLINE double Log1p(double y) { return __builtin_log1p(y); }

// slope * v, and 0 where the slope is 0: of infinities, too.
template <typename Vector>
SYNCBN_INLINE Vector OnSlope(const Slopes<Vector>& f, Vector v) {
  return f.slope != 0 ? f.slope * v : Vector{};
}

// f(z)
template <Kind kKind, typename Vector>
SYNCBN_INLINE Vector Activate(Vector z, const Slopes<Vector>& f) {
  if (kKind == kLeakyOfX) return z <= 0 ? OnSlope(f, z) : z;  // a NaN stays one
  if (kKind == kEluOfX) {
    for (unsigned i = 0; i < sizeof(z) / sizeof(z[0]); ++i)
      z[i] = z[i] > 0 ? z[i] : f.slope[i] * Expm1(z[i]);
  }
  return z;
}

// From t and dy = dL/dy to u, which is x - mean or z - offset, and dz = dL/dz.
template <Kind kKind, typename Vector>
SYNCBN_INLINE void Unwind(Vector t, Vector dy, const Affine<Vector>& k, const Slopes<Vector>& f,
                          Vector* u, Vector* dz) {
  *dz = dy;
  if (kKind == kLeakyOfY) {
    *dz = t > 0 ? dy : f.slope * dy;
    *u = (t > 0 ? t : f.inverse * t) - k.mean;
    return;
  }
  if (kKind == kEluOfY) {
    *dz = t > 0 ? dy : (t + f.slope) * dy;
    for (unsigned i = 0; i < sizeof(t) / sizeof(t[0]); ++i)
      t[i] = t[i] > 0 ? t[i] : Log1p(f.inverse[i] * t[i]);
  }
  *u = t - k.mean;
  if (!ReadsX(kKind)) return;
  const Vector z = k.scale * *u + k.offset;
  if (kKind == kLeakyOfX) *dz = z <= 0 ? OnSlope(f, dy) : dy;
  if (kKind == kEluOfX) {
    for (unsigned i = 0; i < sizeof(z) / sizeof(z[0]); ++i)
      (*dz)[i] = z[i] > 0 ? dy[i] : f.slope[i] * Exp(z[i]) * dy[i];
  }
}

}  // namespace
}  // namespace cpu
}  // namespace syncbn
