// Copies the data of a native test to a GPU for one call, and copies the results back, so that the
// same test runs in emulation and on a GPU.
//
// Each block has the alignment that it has on the host, and an allocation that ends with the block,
// so that compute-sanitizer finds accesses beyond its end. The guards around tensors are also
// copied.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "core/dtype.h"
#include "core/layout.h"
#include "cuda_runtime.h"
#include "tensor.h"

namespace test {

inline void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::cerr << "CUDA: " << cudaGetErrorString(status) << std::endl;
  std::exit(1);
}

class Staging {
 public:
  Staging(syncbn::DType dtype, const syncbn::Layout& layout) : dtype_(dtype), layout_(layout) {}
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  // Waits for the kernel and copies its results to the host.
  ~Staging() {
    Check(cudaStreamSynchronize(nullptr));
    for (const Piece& piece : pieces_) {
      if (piece.written) Copy(piece.host, piece.device, piece.bytes);
      Check(cudaFree(piece.allocation));
    }
  }

  const void* In(const void* tensor) { return Stage(tensor, TensorBytes(), Tensor::kGuard); }
  void* Out(void* tensor) { return Written(tensor, TensorBytes()); }
  const double* Vector(const double* values) {
    return static_cast<const double*>(Stage(values, layout_.channels * sizeof(double), 0));
  }
  // `doubles` and `workspace` also belong to tensors and have guards.
  double* Result(double* doubles) {
    return static_cast<double*>(Written(doubles, layout_.channels * sizeof(double)));
  }
  void* Workspace(void* workspace, int64_t bytes) { return Written(workspace, bytes); }
  // Stages a tensor of `size` bytes that a kernel may write.
  void* Written(void* begin, size_t size) {
    void* const device = Stage(begin, size, Tensor::kGuard);
    for (Piece& piece : pieces_) piece.written |= piece.device + Tensor::kGuard == device;
    return device;
  }

 private:
  struct Piece {
    char *host, *allocation, *device;
    size_t bytes;
    bool written;
  };

  size_t TensorBytes() const {
    return static_cast<size_t>(layout_.Size()) * syncbn::SizeOf(dtype_);
  }
  static void Copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) Check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  }

  // Memory that is staged twice, like an output in place of an input, is one block.
  void* Stage(const void* begin, size_t size, size_t guard) {
    if (begin == nullptr) return nullptr;
    char* const host = static_cast<char*>(const_cast<void*>(begin)) - guard;
    for (const Piece& piece : pieces_) {
      if (piece.host == host) return piece.device + guard;
    }
    const size_t bytes = size + 2 * guard, offset = reinterpret_cast<uintptr_t>(host) % 16;
    Piece piece{host, nullptr, nullptr, bytes, false};
    Check(cudaMalloc(reinterpret_cast<void**>(&piece.allocation), offset + bytes + (bytes == 0)));
    piece.device = piece.allocation + offset;
    Copy(piece.device, host, bytes);
    pieces_.push_back(piece);
    return piece.device + guard;
  }

  const syncbn::DType dtype_;
  const syncbn::Layout layout_;
  std::vector<Piece> pieces_;
};

}  // namespace test
