// Raises an operator's error in MXNet through one of its arrays, one error at a time.
//
// MXNet stores the error of a custom operator in one slot that all of them share without a lock
// (custom-inl.h, `exception_`), and the operator that completes next takes it. That may be a
// healthy operator, because an operator completes in separate work that is queued after other work,
// on a GPU after bulks of tens of milliseconds. Two operators that complete at once free the same
// object twice. But before MXNet completes an operator it also checks the variables of the arrays
// that the callback received, and these are new in each call (custom.cc, AllocateNDArrayCopy). So
// work of the engine that writes one of these arrays throws the error: no other operator can take
// it.
//
// The engine stores every error in a vector, also without a lock (threaded_engine.h,
// AddToGlobalExceptions): twice for each operator, when the array's work and when the operator
// completes. All dependent work searches the vector. So the next operator's error waits until this
// error has been taken, and memory for the vector is reserved at the start, because the vector must
// not move during a search.
#include <condition_variable>
#include <memory>
#include <mutex>

#include "mxnet/engine.h"

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
// nothing can wait for that work. Afterwards the engine no longer skips work on the array. A turn
// that begins after MXNet has queued that work waits for it, so one or two turns suffice. But the
// error may stay in the array: an operator that finds another error in the shared slot completes
// with that one.
struct Watch {
  NDArray array;
  bool is_taken = false;
  int turns = 0;
};

constexpr int kMaxTurns = 10000;  // about 0.1 s, in which MXNet leaves the callback

void SetTaken(void* /*run_context*/, void* watch) { static_cast<Watch*>(watch)->is_taken = true; }

void StartTurn(Watch* watch);

void EndTurn(void* /*run_context*/, void* parameter) {
  std::unique_ptr<Watch> watch(static_cast<Watch*>(parameter));
  if (watch->is_taken || ++watch->turns == kMaxTurns) {
    EndDelivery();
  } else {
    StartTurn(watch.release());
  }
}

// The watch leaks if MXNet refuses work, because the first work may still use it.
void StartTurn(Watch* watch) {
  const NDArrayHandle array = watch->array.Handle();
  if (PushToEngine(SetTaken, watch, nullptr, {}, {array}, kCPUPrioritized) != 0 ||
      PushToEngine(EndTurn, watch, nullptr, {}, {array}, kNoSkip) != 0) {
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
    // MXNET_ENGINE_TYPE=NaiveEngine runs the work, and operators, immediately in this thread.
    EndDelivery();
    throw dmlc::Error(text);
  }
  StartTurn(watch.release());
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
