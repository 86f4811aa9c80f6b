// The kernels for x86-64 with AVX-512 F, BW, DQ and VL, whose flags CMake gives; see
// tile_kernels.inl.
#define SYNCBN_ISA kAvx512
#define SYNCBN_ISA_NAME "avx512"
#include "kernels/cpu/simd_avx512.inl"
#include "kernels/cpu/tile_kernels.inl"
