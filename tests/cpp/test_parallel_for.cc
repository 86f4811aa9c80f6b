// Tests that ParallelFor runs each task once, also with several callers, and makes progress; and
// that work in spare threads can wait for other work, also in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "core/parallel_for.h"
#include "core/spare_threads.h"

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

// Returns the threads of two works that wait for each other.
std::set<std::thread::id> Meet() {
  std::atomic<int> here{0}, done{0};
  std::thread::id ids[2];
  for (std::thread::id& id : ids) {
    syncbn::RunInSpareThread([&] {
      id = std::this_thread::get_id();
      for (++here; here < 2;) std::this_thread::yield();
      ++done;
    });
  }
  while (done < 2) std::this_thread::yield();
  return {ids[0], ids[1]};
}

TEST(SpareThreads) {
  std::set<std::thread::id> all;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    const auto ids = Meet();
    CHECK_EQ(ids.size(), 2u);
    all.insert(ids.begin(), ids.end());
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  CHECK(all.size() < 100, all.size(), " threads");
#if !defined(__SANITIZE_THREAD__)  // it does not follow threads of forked children
  const pid_t child = fork();
  if (child == 0) _exit(Meet().size() == 2 ? 0 : 1);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
#endif
}

}  // namespace

int main() {
  setenv("OMP_NUM_THREADS", "4,2", 1);
  return check::RunTests();
}
