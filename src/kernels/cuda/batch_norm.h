// The kernels' host side for one element type; one file each compiles it, to build in parallel.
#pragma once
#include "kernels/cuda/batch_norm_cuda.h"

struct __half;

namespace syncbn::cuda {

template <typename T>
struct BatchNorm {
  static void LocalMoments(const ReductionPass& pass, void* workspace, Stream stream);
  static void Normalize(const ElementwisePass& pass, Stream stream);
  static void BackwardSums(const ReductionPass& pass, void* workspace, Stream stream);
  static void BackwardApply(const ElementwisePass& pass, Stream stream);
};

}  // namespace syncbn::cuda
