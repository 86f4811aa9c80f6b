// The tiles that several threads compute, and the kernels of each instruction set.
//
// This header has no inline functions, because files with different instruction sets would compile
// them, and the linker could keep the wrong copy.
#pragma once
#include <cstdint>

#include "kernels/passes.h"

namespace syncbn::cpu {

// The part of a tensor that one task computes.
struct Tile {
  int64_t row;    // elements from one outer index to the next: channels * inner of the tensor
  int64_t inner;  // the inner size of the tensor
  int64_t outer_begin, outer_end;
  int64_t channel_begin, channel_end;
  int64_t inner_begin, inner_end;
  int64_t block;  // if it is more than 1, the tile's channels are one block
};

// If the inner size of the tensor is smaller than kMinPlane, a tile has all inner elements of its
// channels. It then has at most kMaxColumns elements for each outer index.
constexpr int64_t kMinPlane = 64;
constexpr int64_t kMaxColumns = 1024;

// Computes a tile. A reduction accumulates the results of channel c of the tensor in first[c] and
// second[c], which the caller must have set to 0.
using ReduceTile = void (*)(const ReductionPass& pass, const Tile& tile, double* first,
                            double* second);
using MapTile = void (*)(const ElementwisePass& pass, const Tile& tile);

// An instruction set. Each function returns the kernel for one of the passes of kernels/passes.h.
struct Isa {
  const char* name;
  ReduceTile (*moments)(const ReductionPass& pass);
  MapTile (*normalize)(const ElementwisePass& pass);
  ReduceTile (*sums)(const ReductionPass& pass);  // two sums, see activation.inl
  MapTile (*apply)(const ElementwisePass& pass);
};

extern const Isa kGeneric, kAvx2, kAvx512;

}  // namespace syncbn::cpu
