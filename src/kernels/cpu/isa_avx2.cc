// The kernels for x86-64 with AVX2, FMA and F16C, whose flags CMake gives; see tile_kernels.inl.
#define SYNCBN_ISA kAvx2
#define SYNCBN_ISA_NAME "avx2"
#include "kernels/cpu/simd_avx2.inl"
#include "kernels/cpu/tile_kernels.inl"
