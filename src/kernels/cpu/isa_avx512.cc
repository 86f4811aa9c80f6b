// The kernels for x86-64 with AVX-512 F, BW, DQ and VL, whose flags CMake sets: loads and stores of
// every element type. tile_kernels.inl has the rest.
#if defined(__GNUC__) && !defined(__clang__)
// Within GCC's own header: GCC bug 105593.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#define SYNCBN_ISA kAvx512
#define SYNCBN_ISA_NAME "avx512"
#define SYNCBN_VECTOR_BYTES 64
#define SYNCBN_HAS_STREAM true
#include "kernels/cpu/simd_types.inl"

namespace syncbn::cpu {
namespace {

SYNCBN_INLINE __m128i Load16Bytes(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
SYNCBN_INLINE __m256i Load32Bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

SYNCBN_INLINE double ToDouble(Half x) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
}

SYNCBN_INLINE void Load(const Half* p, Floats* v) {
  *v = (Floats)_mm512_cvtph_ps(Load32Bytes(p));
}

SYNCBN_INLINE void Load(const float* p, Doubles* v) {
  *v = (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(p));
}

SYNCBN_INLINE void Load(const Half* p, Doubles* v) {
  *v = (Doubles)_mm512_cvtps_pd(_mm256_cvtph_ps(Load16Bytes(p)));
}

SYNCBN_INLINE void Store(Half* p, Floats v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

SYNCBN_INLINE void Stream(float* p, Floats v) { _mm512_stream_ps(p, (__m512)v); }
SYNCBN_INLINE void Stream(double* p, Doubles v) { _mm512_stream_pd(p, (__m512d)v); }
SYNCBN_INLINE void EndStream() { _mm_sfence(); }

}  // namespace
}  // namespace syncbn::cpu

#include "kernels/cpu/tile_kernels.inl"
