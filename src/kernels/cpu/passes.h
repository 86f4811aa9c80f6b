// The passes over a tensor that is not empty, each with what one tile is to it. A reduction leaves the
// tile's partial results in the workspace, and Finish merges those of a range of channels, in a fixed
// order, into arrays that were zero.
// Who uses it: batch_norm_cpu.cc, which documents what each computes. They must not know of threads,
// nor instruction sets: isa.h chooses one.
#pragma once
#include <cstdint>

#include "core/moments.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/partition.h"

namespace syncbn {
namespace cpu {

// Partial results of one tile: an array of all channels for each of the two quantities.
inline double* First(void* workspace, const Partition& partition, int64_t partial) {
  return static_cast<double*>(workspace) + 2 * partial * partition.layout.channels;
}
inline double* Second(void* workspace, const Partition& partition, int64_t partial) {
  return First(workspace, partition, partial) + partition.layout.channels;
}

struct MomentsPass {
  const Partition& partition;
  DType dtype;
  const void* x;
  void* workspace;
  double *mean, *m2;

  void OnTile(int64_t index) const {
    const int64_t partial = partition.PartialOf(index);
    ChooseIsa().local_moments(dtype, x, partition.At(index), First(workspace, partition, partial),
                              Second(workspace, partition, partial));
  }

  // All channels have the same counts, so the compiler divides once for each partial result.
  void Finish(int64_t begin, int64_t end) const {
    double done = 0;
    for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
      const double count = static_cast<double>(partition.Count(partial));
      const double* partial_mean = First(workspace, partition, partial);
      const double* partial_m2 = Second(workspace, partition, partial);
      for (int64_t c = begin; c < end; ++c) {
        const Moments merged =
            Merge({done, mean[c], m2[c]}, {count, partial_mean[c], partial_m2[c]});
        mean[c] = merged.mean;
        m2[c] = merged.m2;
      }
      done += count;
    }
  }
};

struct SumsPass {
  const Partition& partition;
  DType dtype;
  const void *t, *dy;
  const Recovery& recovery;
  const double* mean;
  void* workspace;
  double *sum_dz, *sum_dz_u;

  void OnTile(int64_t index) const {
    const int64_t partial = partition.PartialOf(index);
    ChooseIsa().backward_sums(dtype, t, dy, partition.At(index), recovery, mean,
                              First(workspace, partition, partial),
                              Second(workspace, partition, partial));
  }

  void Finish(int64_t begin, int64_t end) const {
    for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
      const double* partial_dz = First(workspace, partition, partial);
      const double* partial_dz_u = Second(workspace, partition, partial);
      for (int64_t c = begin; c < end; ++c) {
        sum_dz[c] += partial_dz[c];
        sum_dz_u[c] += partial_dz_u[c];
      }
    }
  }
};

struct NormalizePass {
  const Partition& partition;
  DType dtype;
  const void* x;
  const double *mean, *scale, *offset;
  const Activation& activation;
  StoreMode mode;
  void* y;

  void OnTile(int64_t index) const {
    ChooseIsa().normalize(dtype, x, partition.At(index), mean, scale, offset, activation, mode, y);
  }
};

struct ApplyPass {
  const Partition& partition;
  DType dtype;
  const void *t, *dy;
  const Recovery& recovery;
  const double *mean, *a, *b, *d;
  StoreMode mode;
  void* dx;

  void OnTile(int64_t index) const {
    ChooseIsa().backward_apply(dtype, t, dy, partition.At(index), recovery, mean, a, b, d, mode,
                               dx);
  }
};

}  // namespace cpu
}  // namespace syncbn
