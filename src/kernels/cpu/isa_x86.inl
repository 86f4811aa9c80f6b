// The kernels for x86-64. The compiler flags of isa_avx2.cc and isa_avx512.cc, which include this
// file, choose the instruction set.
#if defined(__GNUC__) && !defined(__clang__)
// GCC bug 105593 makes <immintrin.h> cause these warnings.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

// WIDE and NARROW name intrinsics for vectors of full and of half width.
#if defined(__AVX512F__)
#define SYNCBN_ISA kAvx512
#define SYNCBN_ISA_NAME "avx512"
#define SYNCBN_VECTOR_BYTES 64
#define SYNCBN_WIDE(name) _mm512_##name
#define SYNCBN_NARROW(name) _mm256_##name
typedef __m512 WideFloats;
typedef __m512d WideDoubles;
typedef __m256i Narrow;
#else
#define SYNCBN_ISA kAvx2
#define SYNCBN_ISA_NAME "avx2"
#define SYNCBN_VECTOR_BYTES 32
#define SYNCBN_WIDE(name) _mm256_##name
#define SYNCBN_NARROW(name) _mm_##name
typedef __m256 WideFloats;
typedef __m256d WideDoubles;
typedef __m128i Narrow;
#endif
#define SYNCBN_HAS_STREAMING_STORES true
#include "kernels/cpu/vectors.inl"

namespace syncbn::cpu {
namespace {

// Loads `bytes` bytes from p; the rest of the result is 0.
template <typename Bits>
SYNCBN_INLINE Bits LoadBits(const void* p, int bytes) {
  Bits bits = {};
  __builtin_memcpy(&bits, p, bytes);
  return bits;
}

SYNCBN_INLINE double ToDouble(Half x) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
}

SYNCBN_INLINE void Load(const Half* p, Floats* v) {
  *v = (Floats)SYNCBN_WIDE(cvtph_ps)(LoadBits<Narrow>(p, kVectorBytes / 2));
}

SYNCBN_INLINE void Load(const float* p, Doubles* v) {
  *v = (Doubles)SYNCBN_WIDE(cvtps_pd)(SYNCBN_NARROW(loadu_ps)(p));
}

SYNCBN_INLINE void Load(const Half* p, Doubles* v) {
  const __m128i halves = LoadBits<__m128i>(p, kVectorBytes / 4);
  *v = (Doubles)SYNCBN_WIDE(cvtps_pd)(SYNCBN_NARROW(cvtph_ps)(halves));
}

SYNCBN_INLINE void Store(Half* p, Floats v) {
  const Narrow halves = SYNCBN_WIDE(cvtps_ph)((WideFloats)v, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(p, &halves, sizeof(halves));
}

SYNCBN_INLINE void Stream(float* p, Floats v) { SYNCBN_WIDE(stream_ps)(p, (WideFloats)v); }
SYNCBN_INLINE void Stream(double* p, Doubles v) { SYNCBN_WIDE(stream_pd)(p, (WideDoubles)v); }
SYNCBN_INLINE void EndStreamingStores() { _mm_sfence(); }

}  // namespace
}  // namespace syncbn::cpu

#include "kernels/cpu/tile.inl"
