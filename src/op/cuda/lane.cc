// Lanes live until the process ends: the runtime may be gone before static objects are.
#include "op/cuda/lane.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/check.h"

namespace syncbn {
namespace cuda {
namespace {

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<Lane>>> free;
};

Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

size_t DoubleBytes(int64_t count) { return static_cast<size_t>(count) * sizeof(double); }

}  // namespace

Lane::Lane() {
  // Not after the legacy default stream, which other libraries of the process may use.
  SYNCBN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

void* Lane::Workspace(int64_t bytes) {
  if (bytes > workspace_bytes_) {
    workspace_bytes_ = 0;
    SYNCBN_CUDA_CHECK(cudaFree(workspace_));  // waits for what still runs on it
    workspace_ = nullptr;
    SYNCBN_CUDA_CHECK(cudaMalloc(&workspace_, static_cast<size_t>(bytes)));
    SYNCBN_CUDA_CHECK(cudaMemsetAsync(workspace_, 0, kWorkspaceZeros, stream_));
    workspace_bytes_ = bytes;
  }
  return workspace_;
}

void Lane::Reserve(int64_t device_doubles, int64_t pinned_doubles) {
  if (device_doubles > device_doubles_) {
    device_doubles_ = 0;
    SYNCBN_CUDA_CHECK(cudaFree(device_));
    device_ = nullptr;
    SYNCBN_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&device_), DoubleBytes(device_doubles)));
    device_doubles_ = device_doubles;
  }
  if (pinned_doubles > pinned_doubles_) {
    pinned_doubles_ = 0;
    SYNCBN_CUDA_CHECK(cudaFreeHost(pinned_));
    pinned_ = nullptr;
    SYNCBN_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&pinned_),
                                    DoubleBytes(pinned_doubles), cudaHostAllocMapped));
    pinned_doubles_ = pinned_doubles;
  }
}

void Lane::Synchronize() { SYNCBN_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

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

void Lane::Release(int ordinal, Lane* lane) {
  Pool& pool = ThePool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.free[ordinal].emplace_back(lane);
}

}  // namespace cuda
}  // namespace syncbn
