// The activation, forward and backward, for a Value: a number, or a vector of numbers on the CPU.
// Who includes it: cpu/tile_kernels.inl and cuda/activation.cuh, each in its own namespace, after
// SYNCBN_FORMULA, which marks its functions. Nothing here knows memory layouts.

// Elements of a backward pass give u = x - origin[c], or u = f^-1(y) - origin[c], which is xmu *
// unit[c]. The pass divides once for each channel: the sum of dz * u, or the coefficient of u.
inline const double* OriginOf(const BackwardInput& input) {
  return input.from_output ? input.offset : input.mean;
}
inline const double* UnitOf(const BackwardInput& input) {  // null for 1
  return input.from_output ? input.scale : nullptr;
}

// The ways in which a pass uses the element t that it reads.
enum Kind {
  kPlain,     // no activation; a backward pass reads x, or y of the identity
  kLeakyOfX,  // forward, or backward from x
  kLeakyOfY,  // backward from y
};

SYNCBN_HOST_DEVICE constexpr bool ReadsX(Kind kind) { return kind == kLeakyOfX; }

inline Kind KindOf(const Activation& activation, bool from_output) {
  if (activation.function != Function::kLeakyRelu) return kPlain;
  return from_output ? kLeakyOfY : kLeakyOfX;
}

template <Kind kKind>
struct KindConstant {
  static constexpr Kind value = kKind;
};

// The kinds that a pass has code for.
template <Kind... kKinds>
struct Kinds {
  // Calls run(constant of `kind`), which makes a kind at run time a template argument.
  template <typename Run>
  static void With(Kind kind, const Run& run) {
    (void)((kind == kKinds && (run(KindConstant<kKinds>()), true)) || ...);
  }
};
using ForwardKinds = Kinds<kPlain, kLeakyOfX>;
using BackwardKinds = Kinds<kPlain, kLeakyOfX, kLeakyOfY>;

// Of one channel, or of as many columns as a vector holds.
template <typename Value>
struct Affine {
  Value mean, scale, offset;

  SYNCBN_FORMULA Value Of(Value x) const { return (x - mean) * scale + offset; }
};

template <typename Value>
struct Slopes {
  Value slope, inverse;
};

template <typename Value, typename Scalar = Value>
inline Slopes<Value> MakeSlopes(double slope) {
  return {Value{} + Scalar(slope), Value{} + Scalar(1 / slope)};
}

// slope * v, and 0 where the slope is 0: of infinities, too.
template <typename Value>
SYNCBN_FORMULA Value OnSlope(const Slopes<Value>& f, Value v) {
  return f.slope != 0 ? f.slope * v : Value{};
}

// f(z)
template <Kind kKind, typename Value>
SYNCBN_FORMULA Value Activate(Value z, const Slopes<Value>& f) {
  if (kKind == kLeakyOfX) return z <= 0 ? OnSlope(f, z) : z;  // a NaN stays one
  return z;
}

// From t and dy = dL/dy to u and dz = dL/dz. The mean in `k` is the origin.
template <Kind kKind, typename Value>
SYNCBN_FORMULA void Unwind(Value t, Value dy, const Affine<Value>& k, const Slopes<Value>& f,
                           Value* u, Value* dz) {
  *dz = dy;
  if (kKind == kLeakyOfY) {
    *dz = t > 0 ? dy : f.slope * dy;
    t = t > 0 ? t : f.inverse * t;
  }
  *u = t - k.mean;
  if (ReadsX(kKind)) *dz = k.Of(t) <= 0 ? OnSlope(f, dy) : dy;
}
