// The pool lives until the process ends, like lanes.
#include "op/cuda/memory_pool.h"

#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/check.h"

namespace syncbn {
namespace cuda {
namespace {

struct Pool {
  std::mutex mutex;
  std::map<int, std::multimap<size_t, void*>> unused;  // by device and bytes
};

Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

Piece TakePiece(int ordinal, size_t bytes) {
  Pool& pool = ThePool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto& unused = pool.unused[ordinal];
  const auto fits = unused.lower_bound(bytes);
  if (fits != unused.end() && fits->first / 2 <= bytes) {
    const Piece piece{fits->second, fits->first};
    unused.erase(fits);
    return piece;
  }
  while (!unused.empty()) {
    void* const data = unused.begin()->second;
    unused.erase(unused.begin());
    SYNCBN_CUDA_CHECK(cudaFree(data));
  }
  Piece piece;
  SYNCBN_CUDA_CHECK(cudaMalloc(&piece.data, bytes));
  piece.bytes = bytes;
  return piece;
}

void GivePiece(int ordinal, Piece* piece) {
  const Piece given = std::exchange(*piece, Piece());
  if (given.data == nullptr) return;
  Pool& pool = ThePool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.unused[ordinal].emplace(given.bytes, given.data);
}

}  // namespace cuda
}  // namespace syncbn
