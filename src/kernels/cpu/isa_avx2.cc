// The kernels for x86-64 with AVX2, FMA and F16C, whose flags CMake sets: loads and stores of every
// element type. tile_kernels.inl has the rest.
#include <immintrin.h>

#define SYNCBN_ISA kAvx2
#define SYNCBN_ISA_NAME "avx2"
#define SYNCBN_VECTOR_BYTES 32
#define SYNCBN_HAS_STREAM true
#include "kernels/cpu/simd_types.inl"

namespace syncbn::cpu {
namespace {

SYNCBN_INLINE __m128i Load8Bytes(const void* p) { return _mm_loadl_epi64((const __m128i*)p); }
SYNCBN_INLINE __m128i Load16Bytes(const void* p) { return _mm_loadu_si128((const __m128i*)p); }

SYNCBN_INLINE double ToDouble(Half x) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
}

SYNCBN_INLINE void Load(const Half* p, Floats* v) {
  *v = (Floats)_mm256_cvtph_ps(Load16Bytes(p));
}

SYNCBN_INLINE void Load(const float* p, Doubles* v) {
  *v = (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(p));
}

SYNCBN_INLINE void Load(const Half* p, Doubles* v) {
  *v = (Doubles)_mm256_cvtps_pd(_mm_cvtph_ps(Load8Bytes(p)));
}

SYNCBN_INLINE void Store(Half* p, Floats v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

SYNCBN_INLINE void Stream(float* p, Floats v) { _mm256_stream_ps(p, (__m256)v); }
SYNCBN_INLINE void Stream(double* p, Doubles v) { _mm256_stream_pd(p, (__m256d)v); }
SYNCBN_INLINE void EndStream() { _mm_sfence(); }

}  // namespace
}  // namespace syncbn::cpu

#include "kernels/cpu/tile_kernels.inl"
