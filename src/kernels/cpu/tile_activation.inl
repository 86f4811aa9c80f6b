// The activation, forward and backward, for a vector of elements.
// Who includes it: tile_kernels.inl. Nothing here knows memory layouts.
#include <math.h>

namespace syncbn {
namespace cpu {
namespace {

// What a pass does with the element t that it reads; names the instances of the kernels.
enum Kind {
  kPlain,      // no activation; a backward pass reads x, or y of the identity
  kLeakyOfX,   // forward, or backward from x
  kLeakyOfY,   // backward from y
  kEluOfX,     // forward, or backward from x: no y of an ELU leads back to x exactly enough
};

constexpr bool ReadsX(Kind kind) { return kind == kLeakyOfX || kind == kEluOfX; }

inline Kind KindOf(const Activation& activation, bool from_output) {
  if (activation.function == Function::kElu) return kEluOfX;
  if (activation.function != Function::kLeakyRelu) return kPlain;
  return from_output ? kLeakyOfY : kLeakyOfX;
}

template <Kind kKind>
struct KindConstant {
  static constexpr Kind value = kKind;
};

// The kinds that a pass has instances for.
template <Kind... kKinds>
struct Kinds {
  // Calls run(constant of `kind`): how a kind at run time becomes a template argument.
  template <typename Run>
  SYNCBN_INLINE static void With(Kind kind, const Run& run) {
    (void)((kind == kKinds && (run(KindConstant<kKinds>()), true)) || ...);
  }
};
using ForwardKinds = Kinds<kPlain, kLeakyOfX, kEluOfX>;
using BackwardKinds = Kinds<kPlain, kLeakyOfX, kLeakyOfY, kEluOfX>;

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

// Functions of each lane, for all lanes: branches that are mispredicted would take longer. Not
// inline: a call for each vector is little beside one for each lane, and inlined into every loop they
// take most of the time to compile.
template <typename Scalar, typename Vector>
SYNCBN_INLINE Vector ForEachLane(Vector v, Scalar (*function)(Scalar)) {
  Scalar lanes[sizeof(v) / sizeof(Scalar)];
  __builtin_memcpy(lanes, &v, sizeof(v));
  for (Scalar& lane : lanes) lane = function(lane);
  __builtin_memcpy(&v, lanes, sizeof(v));
  return v;
}
SYNCBN_NOINLINE Floats Exp(Floats z) { return ForEachLane<float>(z, expf); }
SYNCBN_NOINLINE Doubles Exp(Doubles z) { return ForEachLane<double>(z, exp); }
SYNCBN_NOINLINE Floats Expm1(Floats z) { return ForEachLane<float>(z, expm1f); }
SYNCBN_NOINLINE Doubles Expm1(Doubles z) { return ForEachLane<double>(z, expm1); }

// slope * v, and 0 where the slope is 0: of infinities, too.
template <typename Vector>
SYNCBN_INLINE Vector OnSlope(const Slopes<Vector>& f, Vector v) {
  return f.slope != 0 ? f.slope * v : Vector{};
}

// f(z)
template <Kind kKind, typename Vector>
SYNCBN_INLINE Vector Activate(Vector z, const Slopes<Vector>& f) {
  if (kKind == kLeakyOfX) return z <= 0 ? OnSlope(f, z) : z;  // a NaN stays one
  if (kKind == kEluOfX) return z > 0 ? z : f.slope * Expm1(z);
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
  *u = t - k.mean;
  if (!ReadsX(kKind)) return;
  const Vector z = k.scale * *u + k.offset;
  if (kKind == kLeakyOfX) *dz = z <= 0 ? OnSlope(f, dy) : dy;
  if (kKind == kEluOfX) *dz = z > 0 ? dy : f.slope * Exp(z) * dy;
}

}  // namespace
}  // namespace cpu
}  // namespace syncbn
