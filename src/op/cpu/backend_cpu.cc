// The CPU as a backend: kernels work on the caller's memory, so a call has no begin and no end.
#include <algorithm>

#include "core/freed_memory.h"
#include "core/parallel_for.h"
#include "kernels/cpu/passes.h"
#include "op/backend.h"

namespace syncbn {
namespace {

constexpr int64_t kCopyBlock = 1 << 18;  // bytes that one task copies

class CpuBackend : public Backend {
 public:
  void Begin(const Layout&, const std::vector<const Tensor*>&) override {}
  void Finish() override {}
  void Abandon() noexcept override {}

  std::vector<double> Read(const Tensor& vector) override { return ReadVector(vector); }
  void Write(const std::vector<double>& values, WriteMode mode, const Tensor& vector) override {
    WriteVector(values, mode, vector);
  }

  void LocalMoments(const ReductionPass& pass) override {
    KeepFreedMemory();  // this device trains
    cpu::LocalMoments(pass);
  }
  void Normalize(const ElementwisePass& pass) override { cpu::Normalize(pass); }
  void BackwardSums(const ReductionPass& pass) override { cpu::BackwardSums(pass); }
  void BackwardApply(const ElementwisePass& pass) override { cpu::BackwardApply(pass); }

  const void* Keep(const void* tensor, size_t bytes) override {
    if (kept_bytes_ < bytes) {
      Forget();  // before the larger piece is taken
      kept_.reset(new char[bytes]);
      kept_bytes_ = bytes;
    }
    const char* const from = static_cast<const char*>(tensor);
    const int64_t size = static_cast<int64_t>(bytes);
    ParallelFor(CeilDiv(size, kCopyBlock), [&](int64_t block) {
      const int64_t begin = block * kCopyBlock, end = std::min(size, begin + kCopyBlock);
      std::copy(from + begin, from + end, kept_.get() + begin);
    });
    return kept_.get();
  }
  void Forget() override {
    kept_.reset();
    kept_bytes_ = 0;
  }

 private:
  std::unique_ptr<char[]> kept_;
  size_t kept_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend() { return std::make_unique<CpuBackend>(); }

}  // namespace syncbn
