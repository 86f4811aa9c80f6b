// Runs a pass tile by tile on several threads, and lists the passes of each instruction set.
// Declarations only: an inline function here would be compiled by files with different instruction
// sets, and the linker could keep the wrong copy.
//
// A tensor is cut by its shape alone, never by the number of threads: partial results are therefore
// the same in every run.
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

// A pass on one tile. Tensors and per-channel arrays are whole; each call reads and writes its
// tile's part. A reduction writes two numbers of each channel into these arrays, not the pass's.
using ReduceTile = void (*)(const ReductionPass& pass, const Tile& tile, double* first,
                            double* second);
using MapTile = void (*)(const ElementwisePass& pass, const Tile& tile);

// Merges the two numbers of a tile, by `count` elements of each channel, into those of the pass,
// by `done` elements.
using MergeTile = void (*)(const ReductionPass& pass, double done, double count,
                           const double* first, const double* second);
void MergeMoments(const ReductionPass& pass, double done, double count, const double* mean,
                  const double* m2);
void AddSums(const ReductionPass& pass, double done, double count, const double* first,
             const double* second);

// Reduces all tiles, and merges their numbers in a fixed order; zeros for an empty shard.
void Reduce(const ReductionPass& pass, ReduceTile reduce, MergeTile merge);
// Writes all tiles.
void Map(const ElementwisePass& pass, MapTile map);

// True if the output has left the caches before it is read: storing past them then saves fetching
// it first.
bool LeavesCaches(const ElementwisePass& pass);

// The passes of one instruction set. Each chooses the function of a tile, and runs it.
struct Isa {
  const char* name;
  void (*local_moments)(const ReductionPass& pass);
  void (*normalize)(const ElementwisePass& pass);
  void (*backward_sums)(const ReductionPass& pass);
  void (*backward_apply)(const ElementwisePass& pass);
};

extern const Isa kGeneric, kAvx2, kAvx512;

}  // namespace syncbn::cpu
