// The activation for a vector of elements, and the instances that the passes have of it.
// Who includes it: tile_kernels.inl. Nothing here knows memory layouts.
#include <math.h>

namespace syncbn::cpu {
namespace {

// Computed for every lane, because branches that are mispredicted would take longer. Not inline: a
// call for each vector is little beside one for each lane, and inlined into every loop they would
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

#define SYNCBN_FORMULA SYNCBN_INLINE
#include "kernels/activation.inl"
#undef SYNCBN_FORMULA

using ForwardKinds = Kinds<kPlain, kLeakyOfX, kEluOfX>;
using BackwardKinds = Kinds<kPlain, kLeakyOfX, kLeakyOfY, kEluOfX>;

}  // namespace
}  // namespace syncbn::cpu
