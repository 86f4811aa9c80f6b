// Chooses the backend of a device.
#include "op/backend.h"

#include "core/error.h"

namespace syncbn {

std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator) {
  if (device.type != "gpu") return MakeCpuBackend();
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
