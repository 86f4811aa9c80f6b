// The activation for a vector of elements, and the instances that the passes have of it.
// Who includes it: tile_kernels.inl. Nothing here knows memory layouts.

namespace syncbn::cpu {
namespace {

// What Exp and Expm1 need to know of a type: z = n ln(2) + r, where |r| is at most ln(2) / 2, and
// kTerms of r^k / k! give expm1(r) within its rounding. kLowest is the logarithm of the
// smallest normal number; exp of less is 0.
template <typename Vector>
struct Exponential;
template <>
struct Exponential<Floats> {
  typedef float Scalar;
  typedef uint32_t Bits;
  static constexpr int kTerms = 7, kMantissaBits = 23, kBias = 127;
  static constexpr float kLowest = -87.33654f, kLog2High = 0x1.62e4p-1f, kLog2Low = 0x1.7f7d1cp-20f;
};
template <>
struct Exponential<Doubles> {
  typedef double Scalar;
  typedef uint64_t Bits;
  static constexpr int kTerms = 13, kMantissaBits = 52, kBias = 1023;
  static constexpr double kLowest = -708.3964185322641, kLog2High = 0x1.62e42feep-1,
                          kLog2Low = 0x1.a39ef35793c76p-33;
};

// Sets 2^n and expm1(r), for z <= 0; a NaN stays one. Where z is below kLowest it is raised to it.
template <typename Vector>
SYNCBN_INLINE void SplitExponential(Vector z, Vector* power, Vector* expm1) {
  typedef Exponential<Vector> E;
  typedef typename E::Scalar Scalar;
  typedef typename E::Bits Bits __attribute__((vector_size(sizeof(Vector))));
  z = z < E::kLowest ? Vector{} + E::kLowest : z;
  // Adding 1.5 * 2^kMantissaBits rounds to an integer, which the lowest bits of the sum hold.
  const Scalar shift = Scalar(typename E::Bits{3} << (E::kMantissaBits - 1));
  const Vector shifted = z * Scalar(0x1.71547652b82fep0) + shift, n = shifted - shift;
  Bits bits;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + E::kBias) << E::kMantissaBits;
  __builtin_memcpy(power, &bits, sizeof(bits));
  const Vector r = z - n * E::kLog2High - n * E::kLog2Low;
  Vector sum = r;
  for (int k = E::kTerms; k > 1; --k) sum = r + r * sum * Scalar(1.0 / k);
  *expm1 = sum;
}

// Their results are used only where z <= 0.
template <typename Vector>
SYNCBN_INLINE Vector Exp(Vector z) {
  Vector power, expm1;
  SplitExponential(z, &power, &expm1);
  const Vector exp = power + power * expm1;
  return z < Exponential<Vector>::kLowest ? Vector{} : exp;
}
template <typename Vector>
SYNCBN_INLINE Vector Expm1(Vector z) {
  Vector power, expm1;
  SplitExponential(z, &power, &expm1);
  return (power - 1) + power * expm1;
}

#define SYNCBN_FORMULA SYNCBN_INLINE
#include "kernels/activation.inl"
#undef SYNCBN_FORMULA

using ForwardKinds = Kinds<kPlain, kLeakyOfX, kEluOfX>;
using BackwardKinds = Kinds<kPlain, kLeakyOfX, kLeakyOfY, kEluOfX>;

}  // namespace
}  // namespace syncbn::cpu
