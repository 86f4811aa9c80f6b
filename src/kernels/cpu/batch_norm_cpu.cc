// The order of a pass's tiles, and the threads that compute them; tiled_passes.h has the tiles.
// Who uses it: op/cpu.
#include "kernels/cpu/batch_norm_cpu.h"

#include <algorithm>
#include <functional>

#include "core/parallel_for.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/partition.h"
#include "kernels/cpu/tiled_passes.h"

namespace syncbn::cpu {
namespace {

// Tensors up to this many elements are done before another thread would have woken up.
constexpr int64_t kAloneSize = 32768;

// Bytes of a block of channels that the second pass still finds in cache: about a core's part of L2
// and the last level.
constexpr int64_t kCacheSize = 2 << 20;

// Outputs from this size on are hardly in cache any more when somebody reads them, and storing past
// the cache saves fetching them first.
constexpr int64_t kStreamSize = 8 << 20;

template <typename Writing>
StoreMode ModeOf(const Writing& pass, const void* out) {
  if (pass.request == Request::kAdd) return StoreMode::kAdd;
  const int64_t size = static_cast<int64_t>(SizeOf(pass.dtype));
  // Arrays that others lend to MXNet may lie anywhere.
  const bool aligned = reinterpret_cast<uintptr_t>(out) % SizeOf(pass.dtype) == 0;
  const bool large = pass.layout.Size() * size >= kStreamSize;
  return aligned && large ? StoreMode::kStream : StoreMode::kAssign;
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

// True if a block of channels stays in cache, and no thread idles at the end for longer than that
// saves. `size` is the bytes of an element in all inputs together.
bool PaysByBlock(const Partition& partition, int64_t size) {
  const Layout& layout = partition.layout;
  const int64_t blocks = partition.channel_blocks, threads = NumThreads();
  const int64_t turns = CeilDiv(blocks, threads);
  return layout.Size() > kAloneSize && 5 * turns * threads <= 6 * blocks &&
         layout.PerChannel() * partition.channel_step * size <= kCacheSize;
}

// A reduction, `between`, and the pass that writes: a block of channels after the other if that
// pays.
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

void LocalMoments(const MomentsPass& pass, void* workspace) {
  Clear(pass.layout, pass.mean, pass.m2);
  if (pass.layout.Size() == 0) return;
  const Partition partition = Cut(pass.layout);
  Reduce(TiledMoments{partition, pass, {partition, workspace}});
}

void MomentsAndNormalize(const MomentsPass& moments, const Between& between,
                         const NormalizePass& normalize, void* workspace) {
  Clear(moments.layout, moments.mean, moments.m2);
  if (moments.layout.Size() == 0) return between(0, moments.layout.channels);
  const Partition partition = Cut(moments.layout);
  ReduceAndWrite(TiledMoments{partition, moments, {partition, workspace}}, between,
                 TiledNormalize{partition, normalize, ModeOf(normalize, normalize.y)},
                 static_cast<int64_t>(SizeOf(moments.dtype)));
}

void BackwardSums(const SumsPass& pass, void* workspace) {
  Clear(pass.layout, pass.sum_dz, pass.sum_dz_u);
  if (pass.layout.Size() == 0) return;
  const Partition partition = Cut(pass.layout);
  Reduce(TiledSums{partition, pass, {partition, workspace}});
}

void SumsAndApply(const SumsPass& sums, const Between& between, const ApplyPass& apply,
                  void* workspace) {
  Clear(sums.layout, sums.sum_dz, sums.sum_dz_u);
  if (sums.layout.Size() == 0) return between(0, sums.layout.channels);
  const Partition partition = Cut(sums.layout);
  ReduceAndWrite(TiledSums{partition, sums, {partition, workspace}}, between,
                 TiledApply{partition, apply, ModeOf(apply, apply.dx)},
                 2 * static_cast<int64_t>(SizeOf(sums.dtype)));
}

void Normalize(const NormalizePass& pass) {
  if (pass.layout.Size() == 0) return;
  const Partition partition = Cut(pass.layout);
  ForEachTile(TiledNormalize{partition, pass, ModeOf(pass, pass.y)});
}

void BackwardApply(const ApplyPass& pass) {
  if (pass.layout.Size() == 0) return;
  const Partition partition = Cut(pass.layout);
  ForEachTile(TiledApply{partition, pass, ModeOf(pass, pass.dx)});
}

const char* InstructionSet() { return ChooseIsa().name; }

}  // namespace syncbn::cpu
