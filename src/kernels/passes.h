// The four passes over memory: two reductions (moments, sums for backward) and two that write a
// tensor (normalize, apply), as structs of the tensors, sizes and coefficients that kernels take, the
// same on the CPU and on a GPU. They own nothing, and are filled by name.
//
// Tensors are (outer, channels, inner), row major, of type `dtype`. Per-channel arrays hold
// `channels` doubles. A shard may be empty (outer or inner is 0): sums are then 0, and no tensor is
// written.
#pragma once
#include "core/dtype.h"
#include "core/layout.h"

namespace syncbn {

// The ways to write an output: it stays as it is, is overwritten, or is added to.
enum class WriteMode { kNull, kWrite, kAdd };

// The function f that is fused into the layer, y = f(z).
enum class Function { kIdentity, kLeakyRelu };

struct Activation {
  Function function = Function::kIdentity;
  double slope = 0;  // of a leaky ReLU for z <= 0; 0 makes it a ReLU
};

// A pass reads this. Of each element x the layer computes xmu = x - mean[c], z = xmu * scale[c] +
// offset[c] and y = f(z); backward dz = dy * f'(z).
struct PassInput {
  DType dtype = DType::kFloat32;
  Layout layout = {};
  const void* in = nullptr;  // x; in backward what was saved, which is x or y
  const void* dy = nullptr;  // backward only
  Activation activation = {};
  // Backward only. False: x was saved; `offset` is not read where f is the identity.
  // True: y was saved, f's slope is positive, and no scale is 0; `mean` is not read.
  bool from_output = false;
  const double* mean = nullptr;
  const double* scale = nullptr;
  const double* offset = nullptr;
};

// Two numbers of each channel over [:, c, :]: the mean and the sum of squared deviations of x (0, 0
// for an empty shard), for which no arrays are read; or the sums of dz and of dz * xmu.
struct ReductionPass : PassInput {
  double* first = nullptr;
  double* second = nullptr;
};

// out = y, or out = scale[c] * dz + scale_xmu[c] * xmu + shift[c]
struct ElementwisePass : PassInput {
  const double* scale_xmu = nullptr;  // backward only, as shift
  const double* shift = nullptr;
  WriteMode mode = WriteMode::kWrite;  // or kAdd
  void* out = nullptr;
};

}  // namespace syncbn
