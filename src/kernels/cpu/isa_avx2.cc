// The kernels for x86-64 with AVX2, FMA and F16C, whose flags CMake sets.
#include "kernels/cpu/isa_x86.inl"
