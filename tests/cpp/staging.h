// Memory of the native tests on a GPU for the length of one call, so that the same tests run on the
// CPU, in emulation, and on a card.
// Who uses it: test_cuda_kernels.cc.
//
// Each piece has an allocation of its own that ends where the piece ends, for compute-sanitizer,
// and lies to vectors' boundaries as it does on the host. The guards around tensors travel along.
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
  // Waits for the kernel, and brings back what it was to write.
  ~Staging() {
    Check(cudaStreamSynchronize(nullptr));
    for (const Piece& piece : pieces_) {
      if (piece.written) Copy(piece.host, piece.device, piece.bytes);
      Check(cudaFree(piece.allocation));
    }
  }

  const void* In(const void* tensor) { return Stage(tensor, TensorBytes(layout_), Tensor::kGuard); }
  void* Out(void* tensor) { return Out(tensor, layout_); }
  void* Out(void* tensor, const syncbn::Layout& of) {
    return Written(tensor, TensorBytes(of), Tensor::kGuard);
  }
  const void* In(const void* tensor, const syncbn::Layout& of) {
    return Stage(tensor, TensorBytes(of), Tensor::kGuard);
  }
  const double* Vector(const double* values) { return Vector(values, layout_.channels); }
  const double* Vector(const double* values, int64_t count) {
    return static_cast<const double*>(Stage(values, count * sizeof(double), 0));
  }
  double* Result(double* values) {
    return static_cast<double*>(Written(values, layout_.channels * sizeof(double), 0));
  }
  void* Workspace(void* workspace, int64_t bytes) { return Written(workspace, bytes, 0); }

 private:
  struct Piece {
    char *host, *allocation, *device;
    size_t bytes;
    bool written;
  };

  size_t TensorBytes(const syncbn::Layout& of) const {
    return static_cast<size_t>(of.Size()) * syncbn::SizeOf(dtype_);
  }
  static void Copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) Check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  }

  // The same memory where the same is asked for again, as for an output in place of an input.
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

  void* Written(void* begin, size_t size, size_t guard) {
    void* const device = Stage(begin, size, guard);
    for (Piece& piece : pieces_) piece.written |= piece.device + guard == device;
    return device;
  }

  const syncbn::DType dtype_;
  const syncbn::Layout layout_;
  std::vector<Piece> pieces_;
};

}  // namespace test
