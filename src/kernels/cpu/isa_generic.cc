// The kernels for any processor.
#define SYNCBN_ISA kGeneric
#define SYNCBN_ISA_NAME "generic"
#define SYNCBN_VECTOR_BYTES 16
#define SYNCBN_HAS_STREAMING_STORES false
#include "kernels/cpu/vectors.inl"

namespace syncbn::cpu {
namespace {

SYNCBN_INLINE float FromBits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

SYNCBN_INLINE uint32_t ToBits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

SYNCBN_INLINE float HalfToFloat(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00)  // infinity or NaN, which becomes quiet
    return FromBits(sign | 0x7f800000 | (magnitude << 13) | (magnitude > 0x7c00 ? 0x400000 : 0));
  if (magnitude < 0x400)  // zero or subnormal: a multiple of 2^-24
    return FromBits(sign | ToBits(float(magnitude) * 0x1p-24f));
  return FromBits(sign | ((magnitude << 13) + (112u << 23)));
}

SYNCBN_INLINE double ToDouble(Half x) { return HalfToFloat(x); }

// Rounds to nearest, ties to even.
SYNCBN_INLINE Half ToHalf(float x) {
  const uint32_t bits = ToBits(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x47800000) {  // 65536 and more
    result = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    result = ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f);
  } else {  // a carry out of the mantissa raises the exponent, up to infinity
    result = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return {uint16_t(sign | result)};
}

template <typename T>
SYNCBN_INLINE void Load(const T* p, Floats* v) {
  for (int i = 0; i < kFloats; ++i) (*v)[i] = float(ToDouble(p[i]));
}

template <typename T>
SYNCBN_INLINE void Load(const T* p, Doubles* v) {
  for (int i = 0; i < kDoubles; ++i) (*v)[i] = ToDouble(p[i]);
}

SYNCBN_INLINE void Store(Half* p, Floats v) {
  for (int i = 0; i < kFloats; ++i) p[i] = ToHalf(v[i]);
}

SYNCBN_INLINE void EndStreamingStores() {}

}  // namespace
}  // namespace syncbn::cpu

#include "kernels/cpu/tile.inl"
