// The CUDA kernels as plain C functions, so that tests drive them from any CUDA array without
// MXNet.
// Who uses it: tests/gpu, whose kernel_passes.py mirrors kernels/passes.h. Pointers in a pass are
// device pointers of the current device; `stream` is a cudaStream_t. Functions return 0, or -1 with
// the text in gluon_syncbn_last_error.
#include "core/c_interface.h"
#include "core/error.h"
#include "kernels/cuda/batch_norm_cuda.h"

namespace cuda = syncbn::cuda;

namespace {

template <typename Pass, typename Kernel>
int Run(const Pass& pass, const Kernel& kernel) {
  return syncbn::CatchAll([&] {
    const int dtype = static_cast<int>(pass.dtype);
    if (!syncbn::IsSupported(dtype)) {
      throw syncbn::Error(syncbn::Concat("no kernels for dtype number ", dtype));
    }
    kernel();
  });
}

}  // namespace

// Bytes, of which the first `gluon_syncbn_cuda_workspace_zeros` are to be zero at first; -1 on
// error.
SYNCBN_EXPORT int64_t gluon_syncbn_cuda_workspace_bytes(const syncbn::MomentsPass* pass) {
  int64_t bytes = -1;
  Run(*pass, [&] { bytes = cuda::WorkspaceBytes(pass->dtype, pass->layout); });
  return bytes;
}

SYNCBN_EXPORT int64_t gluon_syncbn_cuda_workspace_zeros() { return cuda::kWorkspaceZeros; }

SYNCBN_EXPORT int gluon_syncbn_cuda_local_moments(const syncbn::MomentsPass* pass, void* workspace,
                                                  cuda::Stream stream) {
  return Run(*pass, [&] { cuda::LocalMoments(*pass, workspace, stream); });
}

SYNCBN_EXPORT int gluon_syncbn_cuda_normalize(const syncbn::NormalizePass* pass, void*,
                                              cuda::Stream stream) {
  return Run(*pass, [&] { cuda::Normalize(*pass, stream); });
}

SYNCBN_EXPORT int gluon_syncbn_cuda_backward_sums(const syncbn::SumsPass* pass, void* workspace,
                                                  cuda::Stream stream) {
  return Run(*pass, [&] { cuda::BackwardSums(*pass, workspace, stream); });
}

SYNCBN_EXPORT int gluon_syncbn_cuda_backward_apply(const syncbn::ApplyPass* pass, void*,
                                                   cuda::Stream stream) {
  return Run(*pass, [&] { cuda::BackwardApply(*pass, stream); });
}
