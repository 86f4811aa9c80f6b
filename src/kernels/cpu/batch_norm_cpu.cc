// The four kernels: tiles in parallel, then their partial results merged in a fixed order.
// Who uses it: op and c_api. It must not know instruction sets: isa.h chooses one.
#include "kernels/cpu/batch_norm_cpu.h"

#include <algorithm>
#include <functional>

#include "core/moments.h"
#include "core/parallel_for.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/partition.h"

namespace syncbn {
namespace cpu {
namespace {

// Tensors up to this many elements are done before another thread would have woken up.
constexpr int64_t kAloneSize = 32768;

// `run(tile, partial)` for each tile of the partition.
template <typename Run>
void ForEachTile(const Partition& partition, const Run& run) {
  const auto task = [&](int64_t i) { run(partition.At(i), partition.PartialOf(i)); };
  if (partition.layout.Size() > kAloneSize) return ParallelFor(partition.Tiles(), std::cref(task));
  for (int64_t i = 0; i < partition.Tiles(); ++i) task(i);
}

// Partial results of one tile: an array of all channels for each of the two quantities.
double* First(void* workspace, const Partition& partition, int64_t partial) {
  return static_cast<double*>(workspace) + 2 * partial * partition.layout.channels;
}
double* Second(void* workspace, const Partition& partition, int64_t partial) {
  return First(workspace, partition, partial) + partition.layout.channels;
}

}  // namespace

int64_t WorkspaceBytes(const Layout& layout) {
  if (layout.Size() == 0) return 0;
  return Cut(layout).Partials() * layout.channels * 2 * static_cast<int64_t>(sizeof(double));
}

void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace, double* mean,
                  double* m2) {
  std::fill_n(mean, layout.channels, 0.0);
  std::fill_n(m2, layout.channels, 0.0);
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  const Isa& isa = ChooseIsa();
  ForEachTile(partition, [&](const Tile& tile, int64_t partial) {
    isa.local_moments(dtype, x, tile, First(workspace, partition, partial),
                      Second(workspace, partition, partial));
  });
  // All channels have the same counts, so the compiler divides once for each partial result.
  double done = 0;
  for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
    const double count = static_cast<double>(partition.Count(partial));
    const double* partial_mean = First(workspace, partition, partial);
    const double* partial_m2 = Second(workspace, partition, partial);
    for (int64_t c = 0; c < layout.channels; ++c) {
      const Moments merged =
          Merge({done, mean[c], m2[c]}, {count, partial_mean[c], partial_m2[c]});
      mean[c] = merged.mean;
      m2[c] = merged.m2;
    }
    done += count;
  }
}

void FindBelow(DType dtype, const void* t, const Layout& layout, const double* bound,
               void* workspace, double* found) {
  std::fill_n(found, layout.channels, 0.0);
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  const Isa& isa = ChooseIsa();
  ForEachTile(partition, [&](const Tile& tile, int64_t partial) {
    isa.count_below(dtype, t, tile, bound, First(workspace, partition, partial),
                    Second(workspace, partition, partial));
  });
  for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
    const double* count = First(workspace, partition, partial);
    for (int64_t c = 0; c < layout.channels; ++c) found[c] += count[c];
  }
}

void BackwardSums(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u) {
  std::fill_n(sum_dz, layout.channels, 0.0);
  std::fill_n(sum_dz_u, layout.channels, 0.0);
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  const Isa& isa = ChooseIsa();
  ForEachTile(partition, [&](const Tile& tile, int64_t partial) {
    isa.backward_sums(dtype, t, dy, tile, recovery, mean, First(workspace, partition, partial),
                      Second(workspace, partition, partial));
  });
  for (int64_t partial = 0; partial < partition.Partials(); ++partial) {
    const double* partial_dz = First(workspace, partition, partial);
    const double* partial_dz_u = Second(workspace, partition, partial);
    for (int64_t c = 0; c < layout.channels; ++c) {
      sum_dz[c] += partial_dz[c];
      sum_dz_u[c] += partial_dz_u[c];
    }
  }
}

void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
               const double* scale, const double* offset, const Activation& activation,
               Write write, void* y) {
  if (layout.Size() == 0) return;
  const Isa& isa = ChooseIsa();
  ForEachTile(Cut(layout), [&](const Tile& tile, int64_t) {
    isa.normalize(dtype, x, tile, mean, scale, offset, activation, write == Write::kAdd, y);
  });
}

void BackwardApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                   const Recovery& recovery, const double* mean, const double* a,
                   const double* b, const double* d, Write write, void* dx) {
  if (layout.Size() == 0) return;
  const Isa& isa = ChooseIsa();
  ForEachTile(Cut(layout), [&](const Tile& tile, int64_t) {
    isa.backward_apply(dtype, t, dy, tile, recovery, mean, a, b, d, write == Write::kAdd, dx);
  });
}

const char* InstructionSet() { return ChooseIsa().name; }

}  // namespace cpu
}  // namespace syncbn
