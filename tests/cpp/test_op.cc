// Tests op/ apart from the passes: the choice of a backend.
#include "check.h"
#include "op/backend.h"

namespace {

TEST(GpuIsRefusedWhereCudaWasNotBuilt) {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 1}, nullptr); }),
           "SyncBatchNorm on gpu(1): this build of gluon_syncbn has CPU kernels only, because it "
           "was built for native tests; install a working nvcc");
}

}  // namespace

int main() { return check::RunTests(); }
