// The passes over a tensor that is not empty, tile by tile. A reduction leaves the tile's partial
// results in the workspace, and Finish merges them, in a fixed order, into arrays that were zero.
// Who uses it: batch_norm_cpu.cc. They must not know of threads, nor instruction sets: isa.h
// chooses one.
#pragma once
#include <cstdint>

#include "core/moments.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/partition.h"
#include "kernels/passes.h"

namespace syncbn::cpu {

// Partial results of each tile: an array of all channels for each of two quantities.
struct Partials {
  const Partition& partition;
  void* workspace;

  double* First(int64_t partial) const {
    return static_cast<double*>(workspace) + 2 * partial * partition.layout.channels;
  }
  double* Second(int64_t partial) const { return First(partial) + partition.layout.channels; }
};

struct TiledMoments {
  const Partition& partition;
  const MomentsPass& pass;
  Partials partials;

  void OnTile(int64_t index) const {
    const int64_t partial = partition.PartialOf(index);
    ChooseIsa().local_moments(pass, partition.At(index), partials.First(partial),
                              partials.Second(partial));
  }

  // All channels have the same counts, so the compiler divides once for each partial result.
  void Finish() const {
    double done = 0;
    for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
      const double count = static_cast<double>(partition.Count(partial));
      const double *mean = partials.First(partial), *m2 = partials.Second(partial);
      for (int64_t c = 0; c < partition.layout.channels; ++c) {
        const Moments merged = Merge({done, pass.mean[c], pass.m2[c]}, {count, mean[c], m2[c]});
        pass.mean[c] = merged.mean;
        pass.m2[c] = merged.m2;
      }
      done += count;
    }
  }
};

struct TiledSums {
  const Partition& partition;
  const SumsPass& pass;
  Partials partials;

  void OnTile(int64_t index) const {
    const int64_t partial = partition.PartialOf(index);
    ChooseIsa().backward_sums(pass, partition.At(index), partials.First(partial),
                              partials.Second(partial));
  }

  void Finish() const {
    for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
      const double *sum_dz = partials.First(partial), *sum_dz_u = partials.Second(partial);
      for (int64_t c = 0; c < partition.layout.channels; ++c) {
        pass.sum_dz[c] += sum_dz[c];
        pass.sum_dz_xmu[c] += sum_dz_u[c];
      }
    }
    if (!pass.from_output) return;
    // From y the tiles' u is xmu * scale.
    for (int64_t c = 0; c < partition.layout.channels; ++c) pass.sum_dz_xmu[c] /= pass.scale[c];
  }
};

struct TiledNormalize {
  const Partition& partition;
  const NormalizePass& pass;
  StoreMode mode;

  void OnTile(int64_t index) const { ChooseIsa().normalize(pass, partition.At(index), mode); }
};

struct TiledApply {
  const Partition& partition;
  const ApplyPass& pass;
  StoreMode mode;

  void OnTile(int64_t index) const { ChooseIsa().backward_apply(pass, partition.At(index), mode); }
};

}  // namespace syncbn::cpu
