// The element type and the layout of a tensor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/moments.h"

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "gluon_syncbn must be compiled without -ffast-math, which ignores NaN and infinity."
#endif

namespace syncbn {

// The values are MXNet's (mshadow type flags).
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2 };

inline bool IsSupported(int flag) { return flag == 0 || flag == 1 || flag == 2; }

inline size_t SizeOf(DType dtype) {
  if (dtype == DType::kFloat16) return 2;
  return dtype == DType::kFloat32 ? 4 : 8;
}

// Returns MXNet's name of a dtype, or a text with the number of an unknown dtype.
inline std::string NameOfFlag(int flag) {
  static const char* const names[] = {"float32", "float64", "float16", "uint8", "int32",
                                      "int8",    "int64",   "bool",    "int16", "uint16",
                                      "uint32",  "uint64",  "bfloat16"};
  const int known = sizeof(names) / sizeof(*names);
  return flag >= 0 && flag < known ? names[flag] : "MXNet's dtype number " + std::to_string(flag);
}

inline std::string Name(DType dtype) { return NameOfFlag(static_cast<int>(dtype)); }

// The shape of a tensor for the kernels: (outer, channels, inner), row major. NCHW with axis 1 is
// (N, C, H*W); NHWC with axis 3 is (N*H*W, C, 1). A `block` of more than one channel stands for
// oneDNN's layouts nChw8c and nChw16c: (outer, channels / block, inner, block).
struct Layout {
  int64_t outer = 0;
  int64_t channels = 0;
  int64_t inner = 0;
  int64_t block = 1;

  SYNCBN_HOST_DEVICE int64_t PerChannel() const { return outer * inner; }
  SYNCBN_HOST_DEVICE int64_t Size() const { return outer * channels * inner; }
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// An array of the framework, which owns the memory.
struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape{};
  DType dtype = DType::kFloat32;
  int64_t block = 1;  // see Layout
};

}  // namespace syncbn
