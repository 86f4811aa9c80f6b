// The CPU's backend, and which backend a device has.
#include "op/backend.h"

#include <memory>

#include "core/error.h"
#include "core/pages.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cpu/channels_cpu.h"

#if defined(SYNCBN_CUDA)
#include "op/cuda/backend_cuda.h"
#endif

namespace syncbn {
namespace {

cpu::Write ToWrite(Request request) {
  return request == Request::kAdd ? cpu::Write::kAdd : cpu::Write::kAssign;
}

std::vector<char> MakeWorkspace(const Layout& layout) {
  return std::vector<char>(static_cast<size_t>(cpu::WorkspaceBytes(layout)));
}

// Works on the caller's memory directly, so there is nothing to begin nor to finish.
class CpuBackend : public Backend, public CachedPasses {
 public:
  void Begin(const Layout&, std::initializer_list<const Tensor*>) override {}
  void Finish() override {}
  void Abandon() noexcept override {}

  std::vector<double> Read(const Tensor& vector) override { return ReadVector(vector); }
  void Write(const std::vector<double>& values, Request request, const Tensor& vector) override {
    WriteVector(values, request, vector);
  }

  void LocalMoments(const Tensor& x, const Layout& layout, double* mean, double* m2) override {
    cpu::LocalMoments(x.dtype, x.data, layout, MakeWorkspace(layout).data(), mean, m2);
  }
  void Normalize(const Tensor& x, const Layout& layout, const double* mean, const double* scale,
                 const double* offset, const Activation& activation, Request request,
                 const Tensor& y) override {
    ExpectLargeWrite(y.data, layout.Size() * SizeOf(y.dtype));
    cpu::Normalize(x.dtype, x.data, layout, mean, scale, offset, activation, ToWrite(request),
                   y.data);
  }
  void BackwardSums(const Tensor& t, const Tensor& dy, const Layout& layout,
                    const Recovery& recovery, const double* mean, double* sum_dz,
                    double* sum_dz_u) override {
    cpu::BackwardSums(t.dtype, t.data, dy.data, layout, recovery, mean,
                      MakeWorkspace(layout).data(), sum_dz, sum_dz_u);
  }
  void BackwardApply(const Tensor& t, const Tensor& dy, const Layout& layout,
                     const Recovery& recovery, const double* mean, const double* a,
                     const double* b, const double* d, Request request,
                     const Tensor& dx) override {
    ExpectLargeWrite(dx.data, layout.Size() * SizeOf(dx.dtype));
    cpu::BackwardApply(t.dtype, t.data, dy.data, layout, recovery, mean, a, b, d,
                       ToWrite(request), dx.data);
  }

  CachedPasses* cached_passes() override { return this; }
  void MomentsAndNormalize(const Tensor& x, const Layout& layout, double* mean, double* m2,
                           const Between& between, const double* scale, const double* offset,
                           const Activation& activation, Request request,
                           const Tensor& y) override {
    ExpectLargeWrite(y.data, layout.Size() * SizeOf(y.dtype));
    cpu::MomentsAndNormalize(x.dtype, x.data, layout, MakeWorkspace(layout).data(), mean, m2,
                             between, scale, offset, activation, ToWrite(request), y.data);
  }
  void SumsAndApply(const Tensor& t, const Tensor& dy, const Layout& layout,
                    const Recovery& recovery, const double* mean, double* sum_dz,
                    double* sum_dz_u, const Between& between, const double* a, const double* b,
                    const double* d, Request request, const Tensor& dx) override {
    ExpectLargeWrite(dx.data, layout.Size() * SizeOf(dx.dtype));
    cpu::SumsAndApply(t.dtype, t.data, dy.data, layout, recovery, mean,
                      MakeWorkspace(layout).data(), sum_dz, sum_dz_u, between, a, b, d,
                      ToWrite(request), dx.data);
  }

  void* Memory(Place place, size_t bytes) override {
    Piece& piece = pieces_[static_cast<int>(place)];
    if (piece.bytes < bytes) piece = {std::make_unique<double[]>(bytes / sizeof(double) + 1), bytes};
    return piece.data.get();
  }
  void FreeMemory() override {
    for (Piece& piece : pieces_) piece = Piece();
  }
  void Gather(const Tensor& tensor, const Layout& layout, const std::vector<int64_t>& channels,
              void* compact) override {
    cpu::GatherChannels(tensor.dtype, tensor.data, layout, channels, compact);
  }
  void Scatter(const void* compact, const Layout& layout, const std::vector<int64_t>& channels,
               const Tensor& tensor) override {
    cpu::ScatterChannels(tensor.dtype, compact, layout, channels, tensor.data);
  }

 private:
  struct Piece {
    std::unique_ptr<double[]> data;
    size_t bytes = 0;
  };
  Piece pieces_[3];
};

}  // namespace

std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator) {
  if (device.type != "gpu") return std::make_unique<CpuBackend>();
#if defined(SYNCBN_CUDA)
  return MakeCudaBackend(device, allocator);
#else
  (void)allocator;
  throw Error(Concat("SyncBatchNorm on ", device.Name(), ": this build of gluon_syncbn has CPU "
                     "kernels only, because " SYNCBN_CUDA_MISSING "; install a working nvcc, which "
                     "comes with the CUDA toolkit, and build it again with "
                     "`GLUON_SYNCBN_CUDA=1 pip install .`"));
#endif
}

}  // namespace syncbn
