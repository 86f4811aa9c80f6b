// Lanes live until the process ends: the runtime may be gone before static objects are.
#include "op/cuda/lane.h"

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"

namespace syncbn::cuda {
namespace {

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<Lane>>> free;
};

Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

Lane::Lane() {
  LoadKernels();
  // Not after the legacy default stream, which other libraries of the process may use.
  SYNCBN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

void* Lane::Workspace(const Take& take) {
  workspace_.Reserve(MemoryKind::kDevice, static_cast<size_t>(WorkspaceBytes()), take);
  if (!zeroed_) {
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(workspace_.data(), 0, kWorkspaceZeros, Queue()));
    zeroed_ = true;
  }
  return workspace_.data();
}

void Lane::Reserve(int64_t device_doubles, int64_t pinned_doubles, const Take& take) {
  const auto bytes = [](int64_t doubles) { return static_cast<size_t>(doubles) * sizeof(double); };
  device_.Reserve(MemoryKind::kDevice, bytes(device_doubles), take);
  pinned_.Reserve(MemoryKind::kPinned, bytes(pinned_doubles), take);
}

void Lane::Synchronize() {
  if (is_idle_) return;
  SYNCBN_CUDA_CHECK(cudaStreamSynchronize(stream_));
  is_idle_ = true;
}

Lane* Lane::Acquire(int ordinal) {
  Pool& pool = ThePool();
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    auto& free = pool.free[ordinal];
    if (!free.empty()) {
      Lane* lane = free.back().release();
      free.pop_back();
      return lane;
    }
  }
  return new Lane;
}

void Lane::Release(int ordinal, Lane* lane) noexcept {
  Pool& pool = ThePool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  try {
    pool.free[ordinal].emplace_back(lane);
  } catch (const std::bad_alloc&) {
    // The lane leaks.
  }
}

}  // namespace syncbn::cuda
