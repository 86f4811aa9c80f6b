// The shape of a tensor for the layer: (outer, channels, inner), row major. NCHW with axis 1 is
// (N, C, H*W); NHWC with axis 3 is (N*H*W, C, 1).
#pragma once
#include <cstdint>

// Marks functions that both the host and CUDA kernels call.
#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

namespace syncbn {

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

}  // namespace syncbn
