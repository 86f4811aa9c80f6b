// Element types and vectors. isa_generic.cc and isa_x86.inl include this file after they define
// SYNCBN_VECTOR_BYTES and SYNCBN_HAS_STREAMING_STORES. All .inl files here have an unnamed
// namespace and no std templates, so that the linker cannot mix the code of two instruction sets.
#include <cstdint>

#define SYNCBN_INLINE inline __attribute__((always_inline))
#define SYNCBN_NOINLINE __attribute__((noinline))

namespace syncbn::cpu {
namespace {

struct Half {
  uint16_t bits;
};

constexpr int kVectorBytes = SYNCBN_VECTOR_BYTES;
constexpr int kFloats = kVectorBytes / 4;
constexpr int kDoubles = kVectorBytes / 8;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));

SYNCBN_INLINE double ToDouble(float x) { return x; }
SYNCBN_INLINE double ToDouble(double x) { return x; }

SYNCBN_INLINE void Load(const float* p, Floats* v) { __builtin_memcpy(v, p, sizeof(*v)); }
SYNCBN_INLINE void Load(const double* p, Doubles* v) { __builtin_memcpy(v, p, sizeof(*v)); }
SYNCBN_INLINE void Store(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof(v)); }
SYNCBN_INLINE void Store(double* p, Doubles v) { __builtin_memcpy(p, &v, sizeof(v)); }

// True for the types of elements that Stream (isa_x86.inl) stores past the caches. The addresses
// that Stream accepts are multiples of kVectorBytes.
template <typename T>
constexpr bool kCanStream = SYNCBN_HAS_STREAMING_STORES && sizeof(T) >= 4;

// True for the type of elements that oneDNN's layouts with blocks of channels have.
template <typename T>
constexpr bool kCanBlock = false;
template <>
constexpr bool kCanBlock<float> = true;

}  // namespace
}  // namespace syncbn::cpu
