// Tests op/ apart from the passes: running statistics before a step, collected moments, and the
// choice of a backend.
#include "check.h"
#include "op/backend.h"
#include "op/running_history.h"

namespace {

using syncbn::Device;
using syncbn::RunningHistory;
using syncbn::Statistics;

const Device kFirst{"cpu", 0}, kSecond{"cpu", 1};

Statistics Of(double mean) { return {{mean, -mean}, {1 + mean, 2}}; }

// The mean that an undo on this device makes of Of(mean).
double Undone(const RunningHistory& history, const Device& device, double mean) {
  Statistics statistics = Of(mean);
  CHECK_EQ(history.Undo(device, &statistics), statistics.mean[0] != mean);
  const Statistics expected = Of(statistics.mean[0]);
  CHECK(statistics.mean == expected.mean && statistics.var == expected.var);
  return statistics.mean[0];
}

TEST(UpdatesSinceTheLatestStepAreUndone) {
  RunningHistory history;
  history.Note(kFirst, Of(0), Of(1));
  history.EndStep();
  CHECK(!history.IsOpen());
  for (int step = 1; step < 3; ++step) history.Note(kFirst, Of(step), Of(step + 1));
  CHECK(history.IsOpen());
  CHECK_EQ(Undone(history, kFirst, 3), 1);
}

TEST(StatisticsThatOtherCodeHasWrittenStay) {
  RunningHistory history;
  history.Note(kFirst, Of(0), Of(1));
  CHECK_EQ(Undone(history, kFirst, 7), 7);
  history.Note(kFirst, Of(7), Of(8));  // what was written is before the step
  CHECK_EQ(Undone(history, kFirst, 8), 7);
}

// It has no rows, and got the statistics of a device that has.
TEST(DeviceWithoutAnUpdateIsUndoneAsOthers) {
  RunningHistory history;
  history.Note(kFirst, Of(0), Of(1));
  CHECK_EQ(Undone(history, kSecond, 1), 0);
  // Both have rows in the next call, and the other one is first.
  history.Note(kFirst, Of(1), Of(2));
  history.Note(kSecond, Of(1), Of(2));
  CHECK_EQ(Undone(history, kSecond, 2), 0);
}

// By hand: 1 and 3, which two devices add; then 8, of one element.
TEST(BatchesAreCollectedOnce) {
  syncbn::CollectedMoments collected;
  for (int run = 0; run < 2; ++run) {
    collected.Start();
    CHECK(collected.Numbers().empty());
    for (int device = 0; device < 2; ++device) collected.Add(5, 2, {2}, {2}, true);
    collected.Add(6, 0, {0}, {0}, true);  // no device has a row
    collected.Add(7, 1, {8}, {0}, true);
    collected.End();
    // Batches, count, whether unbiased; mean, m2 over all, and within batches.
    CHECK(collected.Numbers() == std::vector<double>({2, 3, 1, 4, 26, 2}));
  }
}

TEST(GpuIsRefusedWhereCudaWasNotBuilt) {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 1}, nullptr); }),
           "SyncBatchNorm on gpu(1): this build of gluon_syncbn has CPU kernels only, because it "
           "was built for native tests; install a working nvcc");
}

}  // namespace

int main() { return check::RunTests(); }
