// The backend of a CPU.
#include <malloc.h>

#include <algorithm>
#include <mutex>
#include <type_traits>

#include "core/environment.h"
#include "core/parallel_for.h"
#include "op/backend.h"

namespace syncbn {
namespace {

constexpr int64_t kCopyBlock = 1 << 18;  // bytes that one task copies

// If GLUON_SYNCBN_KEEP_MEMORY is 1, makes glibc keep memory that this process frees. MXNet
// allocates and frees every array in each step, except in static graphs. glibc would return large
// blocks to the system, and page faults for 30 MB take longer than normalizing 30 MB.
void KeepFreedMemory() {
#if defined(__GLIBC__)
  static std::once_flag once;
  std::call_once(once, [] {
    if (!IsSet("GLUON_SYNCBN_KEEP_MEMORY", "1")) return;
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    // Threads other than the first allocate from heaps of 64 MB. Only a padding of the same size
    // makes glibc keep an empty heap.
    mallopt(M_TOP_PAD, 64 << 20);
  });
#endif
}

// Returns use(pointer to the numbers of a per-channel tensor).
template <typename Use>
auto WithNumbers(const Tensor& vector, const Use& use) {
  if (vector.dtype == DType::kFloat64) return use(static_cast<double*>(vector.data));
  return use(static_cast<float*>(vector.data));
}

class CpuBackend : public Backend {
 public:
  std::vector<double> Read(const Tensor& vector) override {
    return WithNumbers(vector, [&](const auto* from) {
      return std::vector<double>(from, from + vector.shape.at(0));
    });
  }
  void Write(const double* values, WriteMode mode, const Tensor& vector) override {
    if (mode == WriteMode::kNull) return;
    WithNumbers(vector, [&](auto* to) {
      using Number = std::decay_t<decltype(*to)>;
      for (int64_t c = 0; c < vector.shape.at(0); ++c) {
        to[c] = static_cast<Number>(mode == WriteMode::kAdd ? to[c] + values[c] : values[c]);
      }
    });
  }

  void LocalMoments(const ReductionPass& pass) override {
    KeepFreedMemory();  // a program that only predicts does not need it
    cpu::LocalMoments(pass);
  }
  void Normalize(const ElementwisePass& pass) override { cpu::Normalize(pass); }
  void BackwardSums(const ReductionPass& pass) override { cpu::BackwardSums(pass); }
  void BackwardApply(const ElementwisePass& pass) override { cpu::BackwardApply(pass); }

  const void* Keep(const void* tensor, size_t bytes) override {
    kept_.reset();  // frees this block before the next one exists
    kept_.reset(new char[bytes]);
    const char* const from = static_cast<const char*>(tensor);
    const int64_t size = static_cast<int64_t>(bytes);
    ParallelFor(CeilDiv(size, kCopyBlock), [&](int64_t block) {
      const int64_t begin = block * kCopyBlock, end = std::min(size, begin + kCopyBlock);
      std::copy(from + begin, from + end, kept_.get() + begin);
    });
    return kept_.get();
  }
  void Forget() override { kept_.reset(); }

 private:
  std::unique_ptr<char[]> kept_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend() { return std::make_unique<CpuBackend>(); }

}  // namespace syncbn
