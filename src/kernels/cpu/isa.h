// The kernels of one tile, once for each instruction set, and the choice among them.
// Who uses it: batch_norm_cpu.cc. Declarations only: an inline function here would be compiled by
// files with different instruction sets, and the linker could keep the wrong copy.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace syncbn {
namespace cpu {

// A box of a tensor (outer, channels, inner); what one task works on.
struct Tile {
  int64_t row;    // channels * inner of the tensor: elements between two outer indices
  int64_t inner;  // of the tensor
  int64_t outer_begin, outer_end;
  int64_t channel_begin, channel_end;
  int64_t inner_begin, inner_end;
};

// Below this length of a run, a tile is walked as rows of columns instead of planes (and its
// inner range is whole); no such row of a tile is longer than kMaxColumns.
constexpr int64_t kMinPlane = 64;
constexpr int64_t kMaxColumns = 1024;

// Tensors and per-channel arrays are passed whole; each call reads and writes its tile's part.
struct Isa {
  const char* name;

  // mean[c], m2[c] of the tile
  void (*local_moments)(DType dtype, const void* x, const Tile& tile, double* mean, double* m2);

  // sum_dy[c], sum_dy_xmu[c] of the tile
  void (*backward_sums)(DType dtype, const void* x, const void* dy, const Tile& tile,
                        const double* mean, double* sum_dy, double* sum_dy_xmu);

  // out = b * (x - mean) + d, plus a * dy where dy is given, plus the old out where `add`
  void (*apply)(DType dtype, const void* x, const void* dy, const Tile& tile, const double* mean,
                const double* a, const double* b, const double* d, bool add, void* out);
};

extern const Isa kGeneric, kAvx2, kAvx512;

// The widest that both this build and this machine have; no wider than the one that the variable
// GLUON_SYNCBN_INSTRUCTION_SET names ("generic", "avx2", "avx512"), for the same results on
// different machines, and for tests.
const Isa& ChooseIsa();

}  // namespace cpu
}  // namespace syncbn
