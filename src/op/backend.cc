// The choice of a backend.
#include "op/backend.h"

#include "core/error.h"

namespace syncbn {

std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator) {
  if (device.type != "gpu") return MakeCpuBackend();
#if defined(SYNCBN_CUDA)
  return MakeCudaBackend(device, allocator);
#else
  (void)allocator;
  throw Error(Concat("SyncBatchNorm on ", device.Name(), ": gluon_syncbn must be built with CUDA, ",
                     "got a build for CPUs because " SYNCBN_CUDA_MISSING ". Install a working ",
                     "nvcc, which the CUDA toolkit contains, and build gluon_syncbn again with ",
                     "`GLUON_SYNCBN_CUDA=1 pip install .`."));
#endif
}

}  // namespace syncbn
