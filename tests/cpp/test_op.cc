// Tests op/ apart from the passes: running statistics before a step, and the choice of a backend.
#include "check.h"
#include "op/backend.h"
#include "op/running_history.h"

namespace {

using syncbn::Device;
using syncbn::RunningHistory;
using syncbn::Statistics;

Statistics Of(double mean) { return {{mean, -mean}, {1 + mean, 2}}; }

TEST(StatisticsThatOtherCodeHasWrittenStay) {
  const Device device{"cpu", 0};
  RunningHistory history;
  history.Note(device, Of(0), Of(1));
  Statistics written = Of(7), latest = Of(8);
  CHECK(!history.Undo(device, &written));
  history.Note(device, written, latest);  // what was written is before the step
  CHECK(history.Undo(device, &latest));
  CHECK(latest.mean == written.mean && latest.var == written.var);
}

TEST(GpuIsRefusedWhereCudaWasNotBuilt) {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 1}, nullptr); }),
           "SyncBatchNorm on gpu(1): this build of gluon_syncbn has CPU kernels only, because it "
           "was built for native tests; install a working nvcc");
}

}  // namespace

int main() { return check::RunTests(); }
