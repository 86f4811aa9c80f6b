// The CPU's backend, and which backend a device has.
#include "op/backend.h"

#include "core/error.h"
#include "core/pages.h"
#include "kernels/cpu/batch_norm_cpu.h"

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
class CpuBackend : public Backend {
 public:
  void Begin(const Layout&, DType, std::initializer_list<const Tensor*>) override {}
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
                 const double* offset, Request request, const Tensor& y) override {
    ExpectLargeWrite(y.data, layout.Size() * SizeOf(y.dtype));
    cpu::Normalize(x.dtype, x.data, layout, mean, scale, offset, ToWrite(request), y.data);
  }
  void BackwardSums(const Tensor& x, const Tensor& dy, const Layout& layout, const double* mean,
                    double* sum_dy, double* sum_dy_xmu) override {
    cpu::BackwardSums(x.dtype, x.data, dy.data, layout, mean, MakeWorkspace(layout).data(), sum_dy,
                      sum_dy_xmu);
  }
  void BackwardApply(const Tensor& x, const Tensor& dy, const Layout& layout, const double* mean,
                     const double* a, const double* b, const double* d, Request request,
                     const Tensor& dx) override {
    ExpectLargeWrite(dx.data, layout.Size() * SizeOf(dx.dtype));
    cpu::BackwardApply(x.dtype, x.data, dy.data, layout, mean, a, b, d, ToWrite(request), dx.data);
  }
};

}  // namespace

std::unique_ptr<Backend> MakeBackend(const Device& device) {
  if (device.type != "gpu") return std::make_unique<CpuBackend>();
#if defined(SYNCBN_CUDA)
  return MakeCudaBackend(device);
#else
  throw Error(Concat("SyncBatchNorm on ", device.Name(), ": this build of gluon_syncbn has CPU "
                     "kernels only; install CUDA's nvcc and build it again with "
                     "`GLUON_SYNCBN_CUDA=1 pip install .`"));
#endif
}

}  // namespace syncbn
