// The operator's access to MXNet's engine: errors, memory, and the wait before a fork.
#include <pthread.h>

#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include "core/error.h"
#include "core/program.h"
#include "mxnet/mxnet_api.h"

namespace syncbn {

// ---- errors ------------------------------------------------------------------------------------
//
// FailOperator stores an operator's error in an array of the operator, where MXNet finds it.
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

// ---- memory ------------------------------------------------------------------------------------
//
// MXNet allocates our memory on GPUs, for two reasons. First, CUDA's functions that allocate and
// free wait for the device while they hold locks. If they do so between the launches of an NCCL
// reduction on two GPUs, that is a deadlock. MXNet prevents it with a mutex (Storage::GetMutex),
// which other code cannot lock. Second, MXNet's pool keeps memory that arrays have freed, so
// another allocator would find the GPU full, although MXNet could empty its pool.
//
// MXNet's functions behave as follows on the thread of a custom operator (1.9.1: c_api.cc,
// ndarray.cc, threaded_engine.cc, pooled_storage_manager.h, pinned_memory_storage.h):
// * MXNDArrayCreateEx64 with delay_alloc=0 allocates immediately, under the mutex, without waiting
//   for the engine. If nothing in the pool fits, it may change the thread's current GPU. Pinned
//   memory (context 3) has no pool. All GPUs access it at its host address.
// * MXNDArrayFree deletes the array in the calling thread, because the engine has no work that uses
//   the array. Device memory returns to the pool without calls of CUDA except cudaSetDevice. Pinned
//   memory is freed under the mutex. Nothing is freed at exit.

std::shared_ptr<void> AllocateFromMxnet(const Device& device, MemoryKind kind, size_t bytes) {
  constexpr int kFloat64 = 1, kGpu = 2, kPinnedCpu = 3;
  const int64_t elements = CeilDiv(static_cast<int64_t>(bytes), sizeof(double));
  const int device_type = kind == MemoryKind::kPinned ? kPinnedCpu : kGpu;
  const auto check = [&](int status) {
    if (status == 0) return;
    const std::string error = Mxnet().GetLastError();
    throw DeviceError(Concat("MXNet cannot allocate ", bytes, " bytes for ", device.Name(), ": ",
                             error.substr(0, error.find("\nStack trace"))));
  };
  NDArrayHandle handle = nullptr;
  check(Mxnet().NDArrayCreateEx64(&elements, 1, device_type, device.id, 0, kFloat64, &handle));
  const auto array = std::make_shared<NDArray>(handle);
  void* data = nullptr;
  check(Mxnet().NDArrayGetData(handle, &data));
  return {array, data};
}

// ---- forks -------------------------------------------------------------------------------------
//
// DataLoader forks its workers, and `subprocess` forks in Python 3.9 and older. MXNet's handler of
// forks (initialize.cc, atfork_prepare) first joins the threads of custom operators, and then stops
// the engine. An operator that becomes ready in between has no thread to run on, and the process
// hangs or aborts. Handlers run in the reverse order of registration, so the handler of GuardForks
// runs first and waits until MXNet is idle.
//
// os.fork() calls handlers while it holds the GIL, so no thread could queue the work for which an
// operator waits. So Python first calls WaitBeforeFork without the GIL. The handler is for forks
// that Python does not see.

void WaitBeforeFork() {
  // This clears the errors of arrays, so reads do not raise them. The first error is printed. The
  // next step of a failed layer raises its error again, but errors of other operators are lost.
  if (Mxnet().NDArrayWaitAll() != 0) {
    std::fprintf(stderr, "gluon_syncbn: error of pending work before a fork: %s\n",
                 Mxnet().GetLastError());
  }
}

void GuardForks() {
  const auto prepare = [] {
    BeginFork();
    WaitBeforeFork();
  };
  pthread_atfork(prepare, EndFork, EndFork);
}

}  // namespace syncbn
