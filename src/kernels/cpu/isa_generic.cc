// The kernels for any processor; see tile_kernels.inl.
#define SYNCBN_ISA kGeneric
#define SYNCBN_ISA_NAME "generic"
#include "kernels/cpu/simd_generic.inl"
#include "kernels/cpu/tile_kernels.inl"
