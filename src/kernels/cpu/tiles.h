// Runs a pass tile by tile on several threads, and lists the passes of each instruction set.
//
// This header has no inline functions: files with different instruction sets would compile them,
// and the linker could keep the wrong copy. The shape of a tensor alone defines its tiles, not the
// number of threads, so partial results are the same in every run.
#pragma once
#include <cstdint>

#include "kernels/passes.h"

namespace syncbn::cpu {

// A box of a tensor (outer, channels, inner), the work of one task.
struct Tile {
  int64_t row;    // the tensor's channels * inner: elements between two outer indices
  int64_t inner;  // the tensor's inner
  int64_t outer_begin, outer_end;
  int64_t channel_begin, channel_end;
  int64_t inner_begin, inner_end;
};

// If the tensor's inner is below kMinPlane, a tile consists of rows of columns instead of planes.
// Its inner range is then whole, and no row is longer than kMaxColumns.
constexpr int64_t kMinPlane = 64;
constexpr int64_t kMaxColumns = 1024;

// A pass on one tile. Tensors and per-channel arrays are whole; each call reads and writes the part
// of its tile. A reduction writes its two results for each channel to `first` and `second`.
using ReduceTile = void (*)(const ReductionPass& pass, const Tile& tile, double* first,
                            double* second);
using MapTile = void (*)(const ElementwisePass& pass, const Tile& tile);

// Merges the results of a tile, from `count` elements of each channel, into the results of the
// pass, from `done` elements.
using MergeTile = void (*)(const ReductionPass& pass, double done, double count,
                           const double* first, const double* second);
void MergeMoments(const ReductionPass& pass, double done, double count, const double* mean,
                  const double* m2);
void AddSums(const ReductionPass& pass, double done, double count, const double* first,
             const double* second);

// Reduces all tiles and merges their results in a fixed order. An empty shard gives zeros.
void Reduce(const ReductionPass& pass, ReduceTile reduce, MergeTile merge);
// Writes all tiles.
void Map(const ElementwisePass& pass, MapTile map);

// Returns true if the output leaves the caches before it is read. A store without the caches then
// saves fetching the output first.
bool LeavesCaches(const ElementwisePass& pass);

// The passes of one instruction set. Each chooses the function for a tile and runs it.
struct Isa {
  const char* name;
  void (*local_moments)(const ReductionPass& pass);
  void (*normalize)(const ElementwisePass& pass);
  void (*backward_sums)(const ReductionPass& pass);
  void (*backward_apply)(const ElementwisePass& pass);
};

extern const Isa kGeneric, kAvx2, kAvx512;

}  // namespace syncbn::cpu
