// Element types and vectors common to all instruction sets.
// Who includes it: isa_<set>.cc, after SYNCBN_VECTOR_BYTES and SYNCBN_HAS_STREAM. Like all .inl
// files here it lives in an unnamed namespace and uses no std template, so that the linker cannot
// take code of one instruction set for another.
#include <cstdint>

#define SYNCBN_INLINE inline __attribute__((always_inline))
#define SYNCBN_NOINLINE __attribute__((noinline))

namespace syncbn::cpu {
namespace {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

constexpr int kVectorBytes = SYNCBN_VECTOR_BYTES;
constexpr int kFloats = kVectorBytes / 4;
constexpr int kDoubles = kVectorBytes / 8;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

SYNCBN_INLINE double ToDouble(float x) { return x; }
SYNCBN_INLINE double ToDouble(double x) { return x; }
SYNCBN_INLINE double ToDouble(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

SYNCBN_INLINE void Load(const float* p, Floats* v) { __builtin_memcpy(v, p, sizeof(*v)); }
SYNCBN_INLINE void Load(const double* p, Doubles* v) { __builtin_memcpy(v, p, sizeof(*v)); }
SYNCBN_INLINE void Store(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof(v)); }
SYNCBN_INLINE void Store(double* p, Doubles v) { __builtin_memcpy(p, &v, sizeof(v)); }

// True for types that have Stream, a store past the caches to an address that is a multiple of
// kVectorBytes; other threads see it before all that follows EndStream.
template <typename T>
constexpr bool kCanStream = SYNCBN_HAS_STREAM && sizeof(T) >= 4;

// The upper half of each float, rounded to nearest even, in the lower half of each word.
SYNCBN_INLINE Words RoundToBfloat16(Floats v) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words nan = (Words)(v != v);  // rounding could carry a NaN into an infinity or a zero
  return (rounded & ~nan) | (((bits >> 16) | 0x40u) & nan);
}

}  // namespace
}  // namespace syncbn::cpu
