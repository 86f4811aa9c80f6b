// Memory from CUDA's runtime, in a pool that lives until the process ends, like lanes.
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/check.h"
#include "op/allocator.h"

namespace syncbn {
namespace {

using Key = std::pair<int, MemoryKind>;  // the device's number

struct Pool {
  std::mutex mutex;
  std::map<Key, std::multimap<size_t, void*>> unused;  // by bytes
};

Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

// The smallest unused piece that fits, as bytes and address; null if there is none.
std::pair<size_t, void*> Reuse(const Key& key, size_t bytes) {
  Pool& pool = ThePool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto& unused = pool.unused[key];
  const auto fits = unused.lower_bound(bytes);
  if (fits == unused.end()) return {bytes, nullptr};
  const auto piece = *fits;
  unused.erase(fits);
  return piece;
}

}  // namespace

std::shared_ptr<void> AllocateFromCuda(const Device& device, MemoryKind kind, size_t bytes) {
  const Key key{device.id, kind};
  std::pair<size_t, void*> piece = Reuse(key, bytes);
  if (piece.second == nullptr && kind == MemoryKind::kDevice) {
    SYNCBN_CUDA_CHECK(cudaMalloc(&piece.second, bytes));
  } else if (piece.second == nullptr) {
    SYNCBN_CUDA_CHECK(cudaHostAlloc(&piece.second, bytes, cudaHostAllocMapped));
  }
  return std::shared_ptr<void>(piece.second, [key, piece](void*) {
    Pool& pool = ThePool();
    std::lock_guard<std::mutex> lock(pool.mutex);
    pool.unused[key].insert(piece);
  });
}

}  // namespace syncbn
