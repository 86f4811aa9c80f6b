// The activation, forward and backward, for a Value: a number, or a vector of numbers on the CPU.
// Who includes it: cpu/tile.inl and cuda/tensor.cuh, each in its own namespace, after
// SYNCBN_FORMULA, which marks its functions. Memory layouts are theirs.
//
// Forward:   z = (x - mean) * scale + offset,  y = f(z),  f(z) = z for z > 0, else slope * z
//
// Backward needs xmu = x - mean and dz = dy * f'(z) from each element of dy and of what was saved:
//   from x:  xmu = x - mean                       f'(z) by the sign of z
//   from y:  z = f^-1(y), xmu * scale = z - offset,  f'(z) by the sign of y, which is z's where the
//            slope is positive
// Both are: centered = (x or f^-1(y)) - center, with center = mean, or offset from y. `centered` is
// xmu, or from y xmu * scale; a pass divides by that scale once for each channel (the sum of dz *
// centered, or the coefficient of centered), not for each element.
SYNCBN_FORMULA const double* CenterOf(const PassInput& input) {
  return input.from_output ? input.offset : input.mean;
}

// A coefficient or a sum of xmu as one of `centered`, in channel c; and back.
SYNCBN_FORMULA double PerScale(double value, const PassInput& input, int64_t c) {
  return input.from_output ? value / input.scale[c] : value;
}

// The ways in which a pass uses the element that it reads.
enum Variant {
  kPlain,     // no activation; a backward pass reads x, or y of the identity
  kLeakyOfX,  // forward, or backward from x
  kLeakyOfY,  // backward from y
};

SYNCBN_FORMULA constexpr bool ReadsX(Variant variant) { return variant == kLeakyOfX; }

SYNCBN_FORMULA Variant VariantOf(const PassInput& input) {
  if (input.activation.function != Function::kLeakyRelu) return kPlain;
  return input.from_output ? kLeakyOfY : kLeakyOfX;
}

// (value - center) * scale + offset of one channel, or of as many columns as a vector holds.
template <typename Value>
struct Affine {
  Value center, scale, offset;

  SYNCBN_FORMULA Value Of(Value x) const { return (x - center) * scale + offset; }
};

// An Affine in the arithmetic of a pass. The part of the center that this cannot hold goes into the
// offset, so nothing is lost where the center is far from zero.
template <typename Scalar>
SYNCBN_FORMULA Affine<Scalar> MakeAffine(double center, double scale, double offset) {
  Affine<Scalar> k;
  k.center = static_cast<Scalar>(center);
  k.scale = static_cast<Scalar>(scale);
  k.offset = static_cast<Scalar>(offset - scale * (center - static_cast<double>(k.center)));
  return k;
}

// Splits a coefficient of `centered` into a power of two with half of its exponent, `unit`, and the
// rest, which is returned. The coefficient is about dz / std^2, which float32 may not hold although it
// holds the product, so a pass multiplies by one after the other. Where float32 holds the coefficient,
// that does not change any bit. (No division, whose registers a GPU lacks here.)
SYNCBN_FORMULA double SplitCoefficient(double coefficient, double* unit) {
  uint64_t bits;
  __builtin_memcpy(&bits, &coefficient, sizeof(bits));
  bits = ((bits >> 53 & 0x3ff) + 512) << 52;
  __builtin_memcpy(unit, &bits, sizeof(bits));
  bits = (uint64_t{2046} << 52) - bits;  // of 1 / unit
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

// slope * v, and 0 where the slope is 0: of infinities, too.
template <typename Value>
SYNCBN_FORMULA Value OnSlope(const Slopes<Value>& f, Value v) {
  return f.slope != 0 ? f.slope * v : Value{};
}

// f(z)
template <typename Value>
SYNCBN_FORMULA Value Activate(Variant variant, Value z, const Slopes<Value>& f) {
  if (variant == kLeakyOfX) return z <= 0 ? OnSlope(f, z) : z;  // a NaN stays one
  return z;
}

// From what was saved and dy to `centered` and dz. `to_z` has the center; its scale and offset are
// read where the variant reads x.
template <typename Value>
SYNCBN_FORMULA void Unwind(Variant variant, Value saved, Value dy, const Affine<Value>& to_z,
                           const Slopes<Value>& f, Value* centered, Value* dz) {
  *dz = dy;
  if (variant == kLeakyOfY) {
    *dz = saved > 0 ? dy : f.slope * dy;
    saved = saved > 0 ? saved : f.inverse * saved;
  }
  *centered = saved - to_z.center;
  if (ReadsX(variant)) *dz = to_z.Of(saved) <= 0 ? OnSlope(f, dy) : dy;
}
