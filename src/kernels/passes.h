// The four passes over memory, each as one struct of the tensors, sizes and coefficients that its
// kernels take, the same on the CPU and on a GPU. They own nothing.
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

// mean[c], m2[c] = mean and sum of squared deviations of x[:, c, :]; 0, 0 for an empty shard.
struct MomentsPass {
  DType dtype;
  Layout layout;
  const void* x;
  double *mean, *m2;
};

// y = f((x - mean[c]) * scale[c] + offset[c])
struct NormalizePass {
  DType dtype;
  Layout layout;
  const void* x;
  const double *mean, *scale, *offset;
  Activation activation;
  WriteMode mode;  // for y: kWrite or kAdd
  void* y;
};

// A backward pass computes xmu = x - mean[c], z = xmu * scale[c] + offset[c] and dz = dy * f'(z)
// from each element of dy and of what was saved, which is x or y.
struct BackwardInput {
  DType dtype;
  Layout layout;
  const void *saved, *dy;
  Activation activation;
  // False: x was saved; `scale` and `offset` are not read where f is the identity. True: y was
  // saved, f's slope is positive, and no scale is 0; `mean` is not read.
  bool from_output;
  const double *mean, *scale, *offset;
};

// sum_dz[c], sum_dz_xmu[c] = sums of dz and of dz * xmu over [:, c, :]
struct SumsPass : BackwardInput {
  double *sum_dz, *sum_dz_xmu;
};

// dx = a[c] * dz + b[c] * xmu + d[c]
struct ApplyPass : BackwardInput {
  const double *a, *b, *d;
  WriteMode mode;  // for dx: kWrite or kAdd
  void* dx;
};

}  // namespace syncbn
