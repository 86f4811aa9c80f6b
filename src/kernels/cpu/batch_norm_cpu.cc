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
  pass.Finish();
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

void BackwardSums(const SumsPass& pass, void* workspace) {
  Clear(pass.layout, pass.sum_dz, pass.sum_dz_xmu);
  if (pass.layout.Size() == 0) return;
  const Partition partition = Cut(pass.layout);
  Reduce(TiledSums{partition, pass, {partition, workspace}});
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
