// An operator's error into MXNet, by way of one of its arrays, and one error at a time.
//
// MXNet puts the error of a custom operator into one slot that all of them share without a lock
// (custom-inl.h, `exception_`), and the operator that completes next takes it. That may be a
// healthy one, because an operator completes in separate work that is queued after other work, on a
// GPU after bulks of tens of milliseconds; and two that complete at once free the same object
// twice. But before it completes an operator MXNet also looks at the variables of the arrays that
// the callback was given, and these are new in each call (custom.cc, AllocateNDArrayCopy). So the
// error is thrown by work of the engine that writes one of them: then no other operator can take
// it.
//
// The engine notes every error in a vector, without a lock either (threaded_engine.h,
// AddToGlobalExceptions): twice for each operator, when the array's work and when the operator
// completes, and all work that depends on it searches the vector. So the next operator's error
// waits until this one's has been taken, and memory for the vector is reserved at the start,
// because it must not move while it is searched.
#include "mxnet/callbacks.h"

#include <condition_variable>
#include <memory>
#include <mutex>

namespace syncbn {
namespace {

void ThrowText(void* /*run_context*/, void* text) {
  throw dmlc::Error(*static_cast<const std::string*>(text));
}

void DeleteText(void* text) { delete static_cast<std::string*>(text); }

int PushError(NDArrayHandle array, const std::string& text) {
  return PushToEngine(ThrowText, new std::string(text), DeleteText, {}, {array}, kCPUPrioritized);
}

// Never destroyed: work of the engine uses it until the process ends.
struct State {
  std::mutex mutex;
  bool is_delivering = false;  // one error at a time
  std::condition_variable delivered;
};
State& state = *new State;

void EndDelivery() {
  std::lock_guard<std::mutex> lock(state.mutex);
  state.is_delivering = false;
  state.delivered.notify_one();
}

// The operator takes the error out of its array in work that MXNet queues after the callback, and
// that cannot be waited for. Work on the array that is no longer skipped runs after it. A turn that
// begins after MXNet has queued that work waits for it, so one or two turns suffice. But the error
// may stay in the array: an operator that finds another error in the shared slot completes with it.
struct Watch {
  NDArray array;
  bool is_taken = false;
  int turns = 0;
};

constexpr int kMaxTurns = 10000;  // some 0.1 s, in which MXNet leaves the callback

void NoteTaken(void* /*run_context*/, void* watch) { static_cast<Watch*>(watch)->is_taken = true; }

void WatchOn(Watch* watch);

void EndOrWatchOn(void* /*run_context*/, void* parameter) {
  std::unique_ptr<Watch> watch(static_cast<Watch*>(parameter));
  if (watch->is_taken || ++watch->turns == kMaxTurns) {
    EndDelivery();
  } else {
    WatchOn(watch.release());
  }
}

// Where MXNet refuses work, nobody ends the watch: it leaks, because the first work may use it.
void WatchOn(Watch* watch) {
  const NDArrayHandle array = watch->array.Handle();
  if (PushToEngine(NoteTaken, watch, nullptr, {}, {array}, kCPUPrioritized) != 0 ||
      PushToEngine(EndOrWatchOn, watch, nullptr, {}, {array}, kNoSkip) != 0) {
    EndDelivery();
  }
}

}  // namespace

void FailOperator(NDArray array, const std::string& text) {
  auto watch = std::make_unique<Watch>(Watch{std::move(array)});
  {
    std::unique_lock<std::mutex> lock(state.mutex);
    state.delivered.wait(lock, [] { return !state.is_delivering; });
    state.is_delivering = true;
  }
  if (PushError(watch->array.Handle(), text) != 0) {
    // MXNET_ENGINE_TYPE=NaiveEngine runs the work, and operators, at once in this thread.
    EndDelivery();
    throw dmlc::Error(text);
  }
  WatchOn(watch.release());
}

void ReserveErrors() {
  const int count = 1024;  // two for each operator
  const int64_t shape[] = {1};
  const int cpu = 1, delayed = 1, float32 = 0;
  NDArrayHandle handle = nullptr;
  if (Mxnet().NDArrayCreateEx64(shape, 1, cpu, 0, delayed, float32, &handle) != 0) return;
  const NDArray array(handle);
  for (int i = 0; i < count; ++i) {
    if (PushError(handle, "gluon_syncbn reserves memory for errors") != 0) return;
    Mxnet().NDArrayWaitToRead(handle);  // takes the error
  }
}

}  // namespace syncbn
