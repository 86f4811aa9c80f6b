// The kernels for x86-64 with AVX-512 F, BW, DQ and VL, whose flags CMake sets.
#include "kernels/cpu/isa_x86.inl"
