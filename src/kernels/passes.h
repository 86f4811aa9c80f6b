// The arguments of the four passes over memory, for CPUs and GPUs: two reductions (moments, sums
// for backward) and two passes that write a tensor (normalize, apply).
//
// Tensors are (outer, channels, inner), row major, of type `dtype`. On CPUs a float32 tensor may
// have blocks of channels (Layout). Per-channel arrays have
// `channels` doubles. The sums of an empty shard (outer or inner is 0) are 0.
#pragma once
#include "core/tensor.h"

namespace syncbn {

// How to write an output: leave it unchanged, overwrite it, or add to it.
enum class WriteMode { kNull, kWrite, kAdd };

// The function f that is fused into the layer, y = f(z).
enum class Function { kIdentity, kLeakyRelu };

struct Activation {
  Function function = Function::kIdentity;
  double slope = 0;  // f(z) = slope * z for z <= 0; a slope of 0 is a ReLU
};

// The input of every pass. For each element x of channel c the layer computes xmu = x - mean[c],
// z = xmu * scale[c] + offset[c] and y = f(z); backward computes dz = dy * f'(z).
struct PassInput {
  DType dtype = DType::kFloat32;
  Layout layout = {};
  const void* in = nullptr;  // x; in backward the saved tensor, which is x or y
  const void* dy = nullptr;  // backward only
  Activation activation = {};
  // Backward only. False: x was saved; kernels do not read `offset` if f is the identity.
  // True: y was saved, f's slope is positive, and no scale is 0; kernels do not read `mean`.
  bool from_output = false;
  const double* mean = nullptr;
  const double* scale = nullptr;
  const double* offset = nullptr;
};

// Two results for each channel. LocalMoments computes the mean and the sum of squared deviations of
// x. It does not read `mean`, `scale` or `offset`. BackwardSums computes sum(dz) and sum(dz * xmu).
struct ReductionPass : PassInput {
  double* first = nullptr;
  double* second = nullptr;
};

// out = y, or out = scale[c] * dz + scale_xmu[c] * xmu + shift[c]
struct ElementwisePass : PassInput {
  const double* scale_xmu = nullptr;   // backward only
  const double* shift = nullptr;       // backward only
  WriteMode mode = WriteMode::kWrite;  // or kAdd
  void* out = nullptr;
};

// The passes on the CPU. Results do not depend on the number of threads.
namespace cpu {

void LocalMoments(const ReductionPass& pass);
void Normalize(const ElementwisePass& pass);
void BackwardSums(const ReductionPass& pass);
void BackwardApply(const ElementwisePass& pass);

// Copies a float32 tensor to a layout with another block, which divides the number of channels.
void ChangeBlock(const Layout& layout, const float* in, int64_t block, float* out);

// Returns the instruction set in use: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace cpu
}  // namespace syncbn
