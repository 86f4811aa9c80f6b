// Tests that ParallelFor runs each task once, also with several callers, and makes progress.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "core/parallel_for.h"

namespace {

// The writes of the tasks are not atomic, so ThreadSanitizer checks that the caller may read them.
void CheckEveryIndexOnce(int64_t tasks) {
  std::vector<int> calls(tasks);
  syncbn::ParallelFor(tasks, [&](int64_t i) { ++calls[i]; });
  for (int64_t i = 0; i < tasks; ++i) CHECK_EQ(calls[i], 1, "index ", i, " of ", tasks);
}

TEST(EveryIndexOnce) {
  CHECK_EQ(syncbn::NumThreads(), 4);
  for (int64_t tasks : {0, 1, 2, 3, 7, 64, 10000}) CheckEveryIndexOnce(tasks);
  for (int repeat = 0; repeat < 20000; ++repeat) syncbn::ParallelFor(2, [](int64_t) {});
}

TEST(ConcurrentCallers) {
  Parallel(5, [](int caller) {
    for (int repeat = 0; repeat < 200; ++repeat) CheckEveryIndexOnce(1 + 37 * caller);
  });
}

// A short call ends during a long one, because callers run their own tasks.
TEST(ShortJobBesideALongOne) {
  std::atomic<bool> long_begun{false}, short_done{false};
  std::thread long_caller([&] {
    syncbn::ParallelFor(8, [&](int64_t) {
      long_begun = true;
      while (!short_done) std::this_thread::yield();
    });
  });
  while (!long_begun) std::this_thread::yield();
  CheckEveryIndexOnce(100);
  short_done = true;
  long_caller.join();
}

}  // namespace

int main() {
  setenv("OMP_NUM_THREADS", "4,2", 1);
  return check::RunTests();
}
