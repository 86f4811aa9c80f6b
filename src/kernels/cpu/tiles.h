// Runs a pass tile by tile on several threads, and lists the passes of each instruction set.
//
// This header has no inline functions, because files with different instruction sets would compile
// them, and the linker could keep the wrong copy. Tiles depend on the shape of the tensor, not on
// the number of threads, so results are the same in every run.
#pragma once
#include <cstdint>

#include "kernels/passes.h"

namespace syncbn::cpu {

// A box of a tensor, the work of one task.
struct Tile {
  int64_t row;    // the tensor's channels * inner: elements between two outer indices
  int64_t inner;  // the tensor's inner
  int64_t outer_begin, outer_end;
  int64_t channel_begin, channel_end;
  int64_t inner_begin, inner_end;
};

// If the tensor's inner is below kMinPlane, a tile contains rows of columns instead of planes. Then
// its inner range is whole, and no row is longer than kMaxColumns.
constexpr int64_t kMinPlane = 64;
constexpr int64_t kMaxColumns = 1024;

// A pass on one tile. A reduction writes the results of channel c to first[c] and second[c].
using ReduceTile = void (*)(const ReductionPass& pass, const Tile& tile, double* first,
                            double* second);
using MapTile = void (*)(const ElementwisePass& pass, const Tile& tile);

// Merges partial results of `count` elements of each channel into the results of the pass, which
// have `done` elements so far.
using MergeTile = void (*)(const ReductionPass& pass, double done, double count,
                           const double* first, const double* second);
void MergeMoments(const ReductionPass& pass, double done, double count, const double* mean,
                  const double* m2);
void AddSums(const ReductionPass& pass, double done, double count, const double* first,
             const double* second);

// Reduces all tiles and merges their results in order. An empty shard gives zeros.
void Reduce(const ReductionPass& pass, ReduceTile reduce, MergeTile merge);
void Map(const ElementwisePass& pass, MapTile map);

// The passes of one instruction set.
struct Isa {
  const char* name;
  void (*local_moments)(const ReductionPass& pass);
  void (*normalize)(const ElementwisePass& pass);
  void (*backward_sums)(const ReductionPass& pass);
  void (*backward_apply)(const ElementwisePass& pass);
};

extern const Isa kGeneric, kAvx2, kAvx512;

}  // namespace syncbn::cpu
