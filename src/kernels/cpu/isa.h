// The kernels of one tile, once for each instruction set, and the choice among them. Declarations
// only: an inline function here would be compiled by files with different instruction sets, and the
// linker could keep the wrong copy.
#pragma once
#include <cstdint>

#include "kernels/passes.h"

namespace syncbn::cpu {

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

// The ways in which a kernel stores its results. kStream is kAssign past the caches, for outputs
// that would leave them before they are read; instruction sets without such stores treat it as
// kAssign.
enum class StoreMode { kAssign, kStream, kAdd };

// Tensors and per-channel arrays of a pass are whole; each call reads and writes its tile's part.
struct Isa {
  const char* name;
  // The results of one tile, into these arrays instead of the pass's. From y, sum_dz_centered
  // is still to be divided by the scale.
  void (*local_moments)(const ReductionPass& pass, const Tile& tile, double* mean, double* m2);
  void (*backward_sums)(const ReductionPass& pass, const Tile& tile, double* sum_dz, double* sum_dz_centered);
  void (*normalize)(const ElementwisePass& pass, const Tile& tile, StoreMode mode);
  void (*backward_apply)(const ElementwisePass& pass, const Tile& tile, StoreMode mode);
};

extern const Isa kGeneric, kAvx2, kAvx512;

// The widest that both this build and this machine have; no wider than the one that the variable
// GLUON_SYNCBN_INSTRUCTION_SET names ("generic", "avx2", "avx512"), for the same results on
// different machines, and for tests.
const Isa& ChooseIsa();

}  // namespace syncbn::cpu
