// How the operator `Custom` fails: FailOperator stores its error in an array of the operator, where
// MXNet finds it. The native operator (native_op.cc) passes its error to its own completion
// instead.
//
// MXNet's own way is unsafe: custom operators store their errors in one slot without a lock
// (custom-inl.h, `exception_`), and the operator that completes next takes the error of any other.
// Two operators that complete together free the same object twice. But MXNet also checks the
// operator's arrays for errors, and each call of an operator has its own arrays (custom.cc,
// AllocateNDArrayCopy). So FailOperator queues work that writes one of these arrays and throws.
// Only this call finds the error.
//
// The engine also appends each error to a vector without a lock (threaded_engine.h,
// AddToGlobalExceptions), and work that depends on a failed operator reads the vector. FailOperator
// lets our operators fail one at a time, so they do not append at the same time. ReserveErrors
// reserves memory, because an append that moves the vector's elements would disturb its readers.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "mxnet/mxnet_api.h"

namespace syncbn {
namespace {

// Values of MXNet's FnProperty.
enum EngineProperty {
  kCPUPrioritized = 3,  // does not queue behind operators; skipped while an array has an error
  kNoSkip = 7           // runs even if an array has an error
};

// Queues work that writes `array`. Afterwards MXNet calls `deleter`, unless `deleter` is null.
int Push(EngineWork work, void* parameter, void (*deleter)(void* parameter), NDArrayHandle array,
         EngineProperty property) {
  const MxnetContext cpu{1, 0};
  const int number = property;
  return Mxnet().EnginePushSyncND(work, parameter, deleter, &cpu, nullptr, 0, &array, 1, &number, 0,
                                  "gluon_syncbn");
}

void ThrowText(void* /*run_context*/, void* text) {
  throw dmlc::Error(*static_cast<const std::string*>(text));
}

void DeleteText(void* text) { delete static_cast<std::string*>(text); }

int PushError(NDArrayHandle array, const std::string& text) {
  return Push(ThrowText, new std::string(text), DeleteText, array, kCPUPrioritized);
}

// Never destroyed, because work of the engine uses it until the process ends.
struct State {
  std::mutex mutex;
  bool is_delivering = false;
  std::condition_variable delivered;
};
State& state = *new State;

void EndDelivery() {
  std::lock_guard<std::mutex> lock(state.mutex);
  state.is_delivering = false;
  state.delivered.notify_one();
}

// A wait until MXNet has taken the error out of the operator's array, which happens after the
// operator has returned. Each turn queues two pieces of work on the array: SetTaken, which the
// engine skips while the array has the error, and EndTurn, which it never skips. The number of
// turns is limited, because the error stays in the array if MXNet finds another error in the slot
// that custom operators share.
struct Watch {
  NDArray array;
  bool is_taken = false;
  int turns = 0;
};

constexpr int kMaxTurns = 10000;  // about 0.1 s, far longer than MXNet needs

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

// If MXNet refuses work, the watch leaks, because SetTaken may still use it.
void StartTurn(Watch* watch) {
  const NDArrayHandle array = watch->array.Handle();
  if (Push(SetTaken, watch, nullptr, array, kCPUPrioritized) != 0 ||
      Push(EndTurn, watch, nullptr, array, kNoSkip) != 0) {
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
    // The work has failed in this thread: MXNET_ENGINE_TYPE=NaiveEngine runs it immediately.
    EndDelivery();
    throw dmlc::Error(text);
  }
  StartTurn(watch.release());
}

void ReserveErrors() {
  const int count = 1024;  // each failed operator appends two errors
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
