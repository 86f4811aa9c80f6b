// The four passes over memory, each as one struct of the tensors, sizes and coefficients that its
// kernels take, the same on the CPU and on a GPU.
// Who uses it: op fills them; backends and kernels hand them on by reference. They own nothing.
//
// Tensors are (outer, channels, inner), row major, of type `dtype`. Per-channel arrays hold
// `channels` doubles. A shard may be empty (outer or inner is 0): sums are then 0, and no tensor is
// written.
#pragma once
#include <cstdint>

#include "core/activation.h"
#include "core/dtype.h"
#include "core/layout.h"
#include "core/request.h"

namespace syncbn {

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
  Request request;  // for y: kWrite or kAdd
  void* y;
};

// From each element of t, which is x or y, and of dy a backward pass computes dz = dy * f'(z) and
// u = x - mean[c], or from y u = z - mean[c]: the channels' "mean" is then the offset of z.
struct BackwardInput {
  DType dtype;
  Layout layout;
  const void *t, *dy;
  Activation activation;
  // False: t is x, and `scale` and `offset` lead to z (null where f is the identity). True: t is y,
  // f is no ELU, and its slope is positive.
  bool from_output;
  const double *mean, *scale, *offset;
};

// sum_dz[c], sum_dz_u[c] = sums of dz and of dz * u over [:, c, :]
struct SumsPass : BackwardInput {
  double *sum_dz, *sum_dz_u;
};

// dx = a[c] * dz + b[c] * u + d[c]
struct ApplyPass : BackwardInput {
  const double *a, *b, *d;
  Request request;  // for dx: kWrite or kAdd
  void* dx;
};

}  // namespace syncbn
