// The activation, forward and backward. A Value is a number, or a vector of numbers on the CPU.
// cpu/tile.inl and cuda/tensor.cuh include this file in their namespaces. Both define
// SYNCBN_FORMULA, the specifiers of each function's declaration.
//
// Forward:   z = (x - mean) * scale + offset,  y = f(z),  f(z) = z for z > 0, else slope * z
//
// Backward needs xmu = x - mean and dz = dy * f'(z) from each element of dy and the saved tensor:
//   x was saved:  centered = x - mean = xmu                  and f'(z) from the sign of z
//   y was saved:  centered = f^-1(y) - offset = xmu * scale  and f'(z) from the sign of y, which is
//                 the sign of z if the slope is positive

SYNCBN_FORMULA const double* CenterOf(const PassInput& input) {
  return input.from_output ? input.offset : input.mean;
}

// Divides by the scale of channel c if y was saved, so that k * xmu = PerScale(k) * centered for a
// coefficient k, and sum(dz * xmu) = PerScale(sum(dz * centered)).
SYNCBN_FORMULA double PerScale(double value, const PassInput& input, int64_t c) {
  return input.from_output ? value / input.scale[c] : value;
}

// The activation of a pass, and the tensor that it reads.
enum Variant {
  kPlain,     // no activation
  kLeakyOfX,  // forward, or backward from x
  kLeakyOfY,  // backward from y
};

SYNCBN_FORMULA Variant VariantOf(const PassInput& input) {
  if (input.activation.function != Function::kLeakyRelu) return kPlain;
  return input.from_output ? kLeakyOfY : kLeakyOfX;
}

// (value - center) * scale + offset
template <typename Value>
struct Affine {
  Value center, scale, offset;

  SYNCBN_FORMULA Value Of(Value x) const { return (x - center) * scale + offset; }
};

// Returns an Affine in the arithmetic of a pass. The offset includes what the center loses when it
// is rounded to this arithmetic.
template <typename Scalar>
SYNCBN_FORMULA Affine<Scalar> MakeAffine(double center, double scale, double offset) {
  Affine<Scalar> k;
  k.center = static_cast<Scalar>(center);
  k.scale = static_cast<Scalar>(scale);
  k.offset = static_cast<Scalar>(offset - scale * (center - static_cast<double>(k.center)));
  return k;
}

// Splits a coefficient of `centered` into `unit`, a power of two with half of the exponent, and the
// returned factor. The coefficient, about dz / std^2, may be outside of float32's range although
// its product with `centered` is not. So a pass multiplies by the two factors in turn.
SYNCBN_FORMULA double SplitCoefficient(double coefficient, double* unit) {
  uint64_t bits;
  __builtin_memcpy(&bits, &coefficient, sizeof(bits));
  bits = ((bits >> 53 & 0x3ff) + 512) << 52;
  __builtin_memcpy(unit, &bits, sizeof(bits));
  bits = (uint64_t{2046} << 52) - bits;  // 1 / unit
  double inverse;
  __builtin_memcpy(&inverse, &bits, sizeof(bits));
  return coefficient * inverse;
}

template <typename Value>
struct Slopes {
  Value slope, inverse;
};

template <typename Value, typename Scalar = Value>
SYNCBN_FORMULA Slopes<Value> MakeSlopes(double slope) {
  return {Value{} + Scalar(slope), Value{} + Scalar(1 / slope)};
}

// Returns slope * v, or 0 if the slope is 0, also for infinities.
template <typename Value>
SYNCBN_FORMULA Value OnSlope(const Slopes<Value>& f, Value v) {
  return f.slope != 0 ? f.slope * v : Value{};
}

template <typename Value>
SYNCBN_FORMULA Value Activate(Variant variant, Value z, const Slopes<Value>& f) {
  if (variant == kLeakyOfX) return z <= 0 ? OnSlope(f, z) : z;  // NaN stays NaN
  return z;
}

// Computes `centered` and dz from the saved element and dy. Only kLeakyOfX reads the scale and the
// offset of `to_z`.
template <typename Value>
SYNCBN_FORMULA void Unwind(Variant variant, Value saved, Value dy, const Affine<Value>& to_z,
                           const Slopes<Value>& f, Value* centered, Value* dz) {
  *dz = dy;
  if (variant == kLeakyOfY) {
    *dz = saved > 0 ? dy : f.slope * dy;
    saved = saved > 0 ? saved : f.inverse * saved;
  }
  *centered = saved - to_z.center;
  if (variant == kLeakyOfX) *dz = to_z.Of(saved) <= 0 ? OnSlope(f, dy) : dy;
}
