// The element type and the layout of a tensor, and the moments of numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

// Marks functions that both the host and CUDA kernels call.
#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

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
// (N, C, H*W); NHWC with axis 3 is (N*H*W, C, 1).
struct Layout {
  int64_t outer = 0;
  int64_t channels = 0;
  int64_t inner = 0;

  SYNCBN_HOST_DEVICE int64_t PerChannel() const { return outer * inner; }
  SYNCBN_HOST_DEVICE int64_t Size() const { return outer * channels * inner; }
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `axis` must be in [0, ndim).
inline Layout MakeLayout(const int64_t* shape, int ndim, int axis) {
  Layout layout{1, shape[axis], 1};
  for (int i = 0; i < axis; ++i) layout.outer *= shape[i];
  for (int i = axis + 1; i < ndim; ++i) layout.inner *= shape[i];
  return layout;
}

// The moments of a set of numbers.
struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;  // sum of (x - mean)^2
};

// Returns the moments of the union of two sets. Chan, Golub, LeVeque: Algorithms for computing the
// sample variance, doi:10.1080/00031305.1983.10483115.
SYNCBN_HOST_DEVICE inline Moments Merge(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count;
  const double delta = b.mean - a.mean;
  const double weight = b.count / count;
  return {count, a.mean + delta * weight, a.m2 + b.m2 + delta * delta * a.count * weight};
}

}  // namespace syncbn
