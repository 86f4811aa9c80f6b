// The CPU as a backend: kernels work on the caller's memory, so a call has no begin and no end.
#include "core/pages.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cpu/channels_cpu.h"
#include "op/backend.h"

namespace syncbn {
namespace {

std::vector<char> MakeWorkspace(const Layout& layout) {
  return std::vector<char>(static_cast<size_t>(cpu::WorkspaceBytes(layout)));
}

template <typename Pass>
void ExpectOutput(const Pass& pass, void* out) {
  ExpectLargeWrite(out, static_cast<size_t>(pass.layout.Size()) * SizeOf(pass.dtype));
}

class CpuBackend : public Backend {
 public:
  void Begin(const Layout&, std::initializer_list<const Tensor*>) override {}
  void Finish() override {}
  void Abandon() noexcept override {}

  std::vector<double> Read(const Tensor& vector) override { return ReadVector(vector); }
  void Write(const std::vector<double>& values, Request request, const Tensor& vector) override {
    WriteVector(values, request, vector);
  }

  void LocalMoments(const MomentsPass& pass) override {
    cpu::LocalMoments(pass, MakeWorkspace(pass.layout).data());
  }
  void Normalize(const NormalizePass& pass) override {
    ExpectOutput(pass, pass.y);
    cpu::Normalize(pass);
  }
  void BackwardSums(const SumsPass& pass) override {
    cpu::BackwardSums(pass, MakeWorkspace(pass.layout).data());
  }
  void BackwardApply(const ApplyPass& pass) override {
    ExpectOutput(pass, pass.dx);
    cpu::BackwardApply(pass);
  }

  void* Memory(Place place, size_t bytes) override {
    Piece& piece = pieces_[static_cast<int>(place)];
    if (piece.bytes < bytes) {
      piece = {std::make_unique<double[]>(bytes / sizeof(double) + 1), bytes};
    }
    return piece.data.get();
  }
  void FreeMemory() override {
    for (Piece& piece : pieces_) piece = Piece();
  }
  void Gather(DType dtype, const void* tensor, const Layout& layout,
              const std::vector<int64_t>& channels, void* compact) override {
    cpu::GatherChannels(dtype, tensor, layout, channels, compact);
  }
  void Scatter(DType dtype, const void* compact, const Layout& layout,
               const std::vector<int64_t>& channels, void* tensor) override {
    cpu::ScatterChannels(dtype, compact, layout, channels, tensor);
  }

 private:
  struct Piece {
    std::unique_ptr<double[]> data;
    size_t bytes = 0;
  };
  Piece pieces_[3];  // by Place
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend() { return std::make_unique<CpuBackend>(); }

}  // namespace syncbn
