// Tests how the operator Custom passes its errors to MXNet (mxnet/errors.cc), with an engine that
// runs the work of an array when the test says so.
#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "check.h"
#include "mxnet/mxnet_api.h"

namespace {

struct Work {
  syncbn::EngineWork run;
  void* parameter;
  void (*deleter)(void* parameter);
  bool is_skipped;  // while the array has an error
};

// An array of MXNet, and the work that writes it.
struct Array {
  std::deque<Work> queue;
  std::string error;
};

std::mutex mutex;  // guards all arrays
int num_errors = 0;

// Runs the next work of an array. Returns false if there is none.
bool RunNext(Array* array) {
  Work work;
  bool runs;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (array->queue.empty()) return false;
    work = array->queue.front();
    array->queue.pop_front();
    runs = array->error.empty() || !work.is_skipped;
  }
  try {
    if (runs) work.run(nullptr, work.parameter);
  } catch (const dmlc::Error& error) {
    array->error = error.what();
    ++num_errors;
  }
  if (work.deleter != nullptr) work.deleter(work.parameter);
  return true;
}

bool IsIdle(Array* array) {
  std::lock_guard<std::mutex> lock(mutex);
  return array->queue.empty();
}

int PushSync(syncbn::EngineWork run, void* parameter, void (*deleter)(void*),
             const syncbn::MxnetContext*, void**, int, void** written, int, const int* property,
             int, const char*) {
  constexpr int kNoSkip = 7;
  std::lock_guard<std::mutex> lock(mutex);
  static_cast<Array*>(written[0])->queue.push_back({run, parameter, deleter, *property != kNoSkip});
  return 0;
}

Array created;

int Create(const int64_t*, int, int, int, int, int, void** array) {
  *array = &created;
  return 0;
}

int Wait(void* array) {
  while (RunNext(static_cast<Array*>(array))) continue;
  return std::exchange(static_cast<Array*>(array)->error, "").empty() ? 0 : -1;
}

// MXNet's list of errors has no lock, so a second operator does not fail while an error is on its
// way.
TEST(OperatorsFailOneAtATime) {
  Array first, second;
  syncbn::FailOperator(syncbn::NDArray(&first), "the first error");
  for (int work = 0; work < 300; ++work) CHECK(RunNext(&first));
  CHECK_EQ(first.error, "the first error");
  std::thread fails([&] { syncbn::FailOperator(syncbn::NDArray(&second), "the second error"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(IsIdle(&second), "the first error was not taken");
  first.error.clear();
  int later = 0;
  while (RunNext(&first)) ++later;
  CHECK(later <= 4, "two turns of two pieces of work");
  fails.join();
  CHECK(RunNext(&second));
  CHECK_EQ(second.error, "the second error");
  // MXNet may never take the error. Then the wait for it ends, and the next operator can fail.
  while (RunNext(&second)) continue;
  syncbn::FailOperator(syncbn::NDArray(&first), "the third error");
  CHECK_EQ(Wait(&first), -1);
}

// The list gets room for 1,024 errors, each of which is taken before the next one.
TEST(MemoryForErrors) {
  num_errors = 0;
  syncbn::ReserveErrors();
  CHECK_EQ(num_errors, 1024);
  CHECK(created.error.empty() && IsIdle(&created));
}

}  // namespace

namespace syncbn {

const MxnetApi& Mxnet() {
  static const MxnetApi api = [] {
    MxnetApi fake{};
    fake.EnginePushSyncND = PushSync;
    fake.NDArrayCreateEx64 = Create;
    fake.NDArrayWaitToRead = Wait;
    fake.NDArrayFree = [](void*) { return 0; };
    return fake;
  }();
  return api;
}

}  // namespace syncbn

int main() { return check::RunTests(); }
