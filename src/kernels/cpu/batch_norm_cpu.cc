// The kernels: in which order, and in which threads, the tiles of the passes are done.
// Who uses it: op and c_api. What a tile of a pass is, passes.h knows.
#include "kernels/cpu/batch_norm_cpu.h"

#include <algorithm>
#include <functional>

#include "core/parallel_for.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/partition.h"
#include "kernels/cpu/passes.h"

namespace syncbn {
namespace cpu {
namespace {

// Tensors up to this many elements are done before another thread would have woken up.
constexpr int64_t kAloneSize = 32768;

// What a block of channels may take in bytes to be found in cache by the second pass: about what a
// core has of L2 and the last level.
constexpr int64_t kCacheSize = 2 << 20;

// Outputs from this size on are hardly in cache any more when their reader comes, and storing past the
// cache saves fetching them first.
constexpr int64_t kStreamSize = 8 << 20;

StoreMode ToMode(Write write, DType dtype, const Layout& layout, const void* out) {
  if (write == Write::kAdd) return StoreMode::kAdd;
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  // Arrays that others lend to MXNet may lie anywhere.
  const bool aligned = reinterpret_cast<uintptr_t>(out) % SizeOf(dtype) == 0;
  return aligned && layout.Size() * size >= kStreamSize ? StoreMode::kStream : StoreMode::kAssign;
}

template <typename Pass>
void ForEachTile(const Pass& pass) {
  const auto task = [&](int64_t index) { pass.OnTile(index); };
  const int64_t tiles = pass.partition.Tiles();
  if (pass.partition.layout.Size() > kAloneSize) return ParallelFor(tiles, std::cref(task));
  for (int64_t index = 0; index < tiles; ++index) task(index);
}

template <typename Pass>
void Reduce(const Pass& pass) {
  ForEachTile(pass);
  pass.Finish(0, pass.partition.layout.channels);
}

// Whether a block of channels stays in cache, and no thread idles at the end for longer than that
// saves. `size` is that of an element in all inputs together.
bool PaysByBlock(const Partition& partition, int64_t size) {
  const Layout& layout = partition.layout;
  const int64_t blocks = partition.channel_blocks, threads = NumThreads();
  const int64_t turns = (blocks + threads - 1) / threads;
  return layout.Size() > kAloneSize && 5 * turns * threads <= 6 * blocks &&
         layout.PerChannel() * partition.channel_step * size <= kCacheSize;
}

// A reduction, `between`, and the pass that writes: a block of channels after the other if that pays.
template <typename Reduction, typename Writing>
void ReduceAndWrite(const Reduction& reduction, const Between& between, const Writing& writing,
                    int64_t size) {
  const Partition& partition = reduction.partition;
  if (!PaysByBlock(partition, size)) {
    Reduce(reduction);
    between(0, partition.layout.channels);
    return ForEachTile(writing);
  }
  const auto task = [&](int64_t block) {
    const Tile first = partition.At(partition.IndexOf(block, 0));
    const int64_t begin = first.channel_begin, end = first.channel_end;
    const int64_t partials = partition.Partials();
    for (int64_t k = 0; k < partials; ++k) reduction.OnTile(partition.IndexOf(block, k));
    reduction.Finish(begin, end);
    between(begin, end);
    for (int64_t k = 0; k < partials; ++k) writing.OnTile(partition.IndexOf(block, k));
  };
  ParallelFor(partition.channel_blocks, std::cref(task));
}

void Clear(const Layout& layout, double* first, double* second) {
  std::fill_n(first, layout.channels, 0.0);
  std::fill_n(second, layout.channels, 0.0);
}

}  // namespace

int64_t WorkspaceBytes(const Layout& layout) {
  if (layout.Size() == 0) return 0;
  return Cut(layout).Partials() * layout.channels * 2 * static_cast<int64_t>(sizeof(double));
}

void LocalMoments(DType dtype, const void* x, const Layout& layout, void* workspace, double* mean,
                  double* m2) {
  Clear(layout, mean, m2);
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  Reduce(MomentsPass{partition, dtype, x, workspace, mean, m2});
}

void MomentsAndNormalize(DType dtype, const void* x, const Layout& layout, void* workspace,
                         double* mean, double* m2, const Between& between, const double* scale,
                         const double* offset, const Activation& activation, Write write,
                         void* y) {
  Clear(layout, mean, m2);
  if (layout.Size() == 0) return between(0, layout.channels);
  const Partition partition = Cut(layout);
  ReduceAndWrite(MomentsPass{partition, dtype, x, workspace, mean, m2}, between,
                 NormalizePass{partition, dtype, x, mean, scale, offset, activation,
                               ToMode(write, dtype, layout, y), y},
                 static_cast<int64_t>(SizeOf(dtype)));
}

void BackwardSums(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u) {
  Clear(layout, sum_dz, sum_dz_u);
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  Reduce(SumsPass{partition, dtype, t, dy, recovery, mean, workspace, sum_dz, sum_dz_u});
}

void SumsAndApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                  const Recovery& recovery, const double* mean, void* workspace, double* sum_dz,
                  double* sum_dz_u, const Between& between, const double* a, const double* b,
                  const double* d, Write write, void* dx) {
  Clear(layout, sum_dz, sum_dz_u);
  if (layout.Size() == 0) return between(0, layout.channels);
  const Partition partition = Cut(layout);
  ReduceAndWrite(
      SumsPass{partition, dtype, t, dy, recovery, mean, workspace, sum_dz, sum_dz_u}, between,
      ApplyPass{partition, dtype, t, dy, recovery, mean, a, b, d,
                ToMode(write, dtype, layout, dx), dx},
      2 * static_cast<int64_t>(SizeOf(dtype)));
}

void Normalize(DType dtype, const void* x, const Layout& layout, const double* mean,
               const double* scale, const double* offset, const Activation& activation,
               Write write, void* y) {
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  ForEachTile(NormalizePass{partition, dtype, x, mean, scale, offset, activation,
                            ToMode(write, dtype, layout, y), y});
}

void BackwardApply(DType dtype, const void* t, const void* dy, const Layout& layout,
                   const Recovery& recovery, const double* mean, const double* a,
                   const double* b, const double* d, Write write, void* dx) {
  if (layout.Size() == 0) return;
  const Partition partition = Cut(layout);
  ForEachTile(ApplyPass{partition, dtype, t, dy, recovery, mean, a, b, d,
                        ToMode(write, dtype, layout, dx), dx});
}

const char* InstructionSet() { return ChooseIsa().name; }

}  // namespace cpu
}  // namespace syncbn
