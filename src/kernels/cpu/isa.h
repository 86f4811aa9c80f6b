// The kernels of one tile, once for each instruction set, and the choice among them.
// Who uses it: passes.h. Declarations only: an inline function here would be compiled by
// files with different instruction sets, and the linker could keep the wrong copy.
#pragma once
#include <cstdint>

#include "core/activation.h"
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

// How results get into an output: kStream is kAssign past the caches, where the instruction set can do
// that, for what they would not hold until it is read.
enum class StoreMode { kAssign, kStream, kAdd };

// Tensors and per-channel arrays are passed whole; each call reads and writes its tile's part.
struct Isa {
  const char* name;

  // mean[c], m2[c] of the tile
  void (*local_moments)(DType dtype, const void* x, const Tile& tile, double* mean, double* m2);

  // sum_dz[c], sum_dz_u[c] of the tile
  void (*backward_sums)(DType dtype, const void* t, const void* dy, const Tile& tile,
                        const Recovery& recovery, const double* mean, double* sum_dz,
                        double* sum_dz_u);

  // y = f((x - mean) * scale + offset), plus the old y for kAdd
  void (*normalize)(DType dtype, const void* x, const Tile& tile, const double* mean,
                    const double* scale, const double* offset, const Activation& activation,
                    StoreMode mode, void* y);

  // dx = a * dz + b * u + d, plus the old dx for kAdd
  void (*backward_apply)(DType dtype, const void* t, const void* dy, const Tile& tile,
                         const Recovery& recovery, const double* mean, const double* a,
                         const double* b, const double* d, StoreMode mode, void* dx);
};

extern const Isa kGeneric, kAvx2, kAvx512;

// The widest that both this build and this machine have; no wider than the one that the variable
// GLUON_SYNCBN_INSTRUCTION_SET names ("generic", "avx2", "avx512"), for the same results on
// different machines, and for tests.
const Isa& ChooseIsa();

}  // namespace cpu
}  // namespace syncbn
