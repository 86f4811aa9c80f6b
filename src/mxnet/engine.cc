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
// Raises an operator's error in MXNet through one of its arrays, one error at a time.
//
// MXNet stores the error of a custom operator in one slot that all of them share without a lock
// (custom-inl.h, `exception_`), and the operator that completes next takes it. That may be a
// healthy operator, because an operator completes in separate work that is queued after other work,
// on a GPU after bulks that take tens of milliseconds. Two operators that complete at once free the
// same object twice. But before MXNet completes an operator it also checks the variables of the
// arrays that the callback received, and these are new in each call (custom.cc,
// AllocateNDArrayCopy). So this file queues work that writes one of these arrays and throws the
// error: no other operator can take it.
//
// The engine stores every error in a vector, also without a lock (threaded_engine.h,
// AddToGlobalExceptions): once when the work on the array completes, and once when the operator
// does. All dependent work searches the vector. So the next operator's error waits until this
// error has been taken, and memory for the vector is reserved at the start, because the vector must
// not move during a search.

namespace {

void ThrowText(void* /*run_context*/, void* text) {
  throw dmlc::Error(*static_cast<const std::string*>(text));
}

void DeleteText(void* text) { delete static_cast<std::string*>(text); }

int PushError(NDArrayHandle array, const std::string& text) {
  return PushToEngine(ThrowText, new std::string(text), DeleteText, array, kCPUPrioritized);
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

// The operator takes the error out of its array in work that MXNet queues after the callback. A
// turn is two pieces of work on the array: SetTaken, which is skipped while the array has the
// error, and EndTurn, which is never skipped. A turn that begins after MXNet has queued its own
// work runs after it, so one or two turns suffice. But the error may stay in the array: an operator
// that finds another error in the shared slot completes with that one.
struct Watch {
  NDArray array;
  bool is_taken = false;
  int turns = 0;
};

constexpr int kMaxTurns = 10000;  // about 0.1 s, far longer than MXNet takes to leave the callback

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
  if (PushToEngine(SetTaken, watch, nullptr, array, kCPUPrioritized) != 0 ||
      PushToEngine(EndTurn, watch, nullptr, array, kNoSkip) != 0) {
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
  const int count = 1024;  // two for each of 512 failed operators
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
// Allocates a GPU's memory from MXNet, for two reasons. First, CUDA's calls that allocate and free
// wait for the device's work and hold locks meanwhile. Between the launches of an NCCL reduction on
// two GPUs that is a deadlock, so MXNet holds its storage mutex (Storage::GetMutex) around its own
// calls and around NCCL's launches, and other code has no access to that mutex. Second, MXNet's
// pool keeps memory that its arrays have freed: another allocator finds the GPU full, although
// MXNet, which frees its pool when a request does not fit, would have found room.
//
// These calls have the following effects on the thread of a custom operator (1.9.1: c_api.cc,
// ndarray.cc, threaded_engine.cc, pooled_storage_manager.h, pinned_memory_storage.h):
// * MXNDArrayCreateEx64 with delay_alloc=0 allocates immediately, under the storage mutex, and does
//   not wait for the engine. If nothing in the pool fits, it makes this GPU current, and then
//   restores the GPU that it believes to have been current. Context 3, pinned memory, has no pool:
//   it is cudaHostAlloc, under the same mutex. All GPUs reach such memory at its host address,
//   whatever cudaHostAlloc's flags are.
// * MXNDArrayFree deletes the array's variable. No operator has ever used the variable, so the
//   engine deletes it in the calling thread (FnProperty::kDeleteVar): device memory goes to the
//   pool without any call of CUDA except cudaSetDevice, pinned memory to cudaFreeHost under the
//   mutex. At exit, after the engine has ended, nothing happens.
// * The pool hands out memory that an array has freed. All work that MXNet queued for that array is
//   done by then, because MXNet's operators wait for their stream. Our queued work must also be
//   done before the array is freed.

namespace {

constexpr int kFloat64 = 1, kGpu = 2, kPinnedCpu = 3;

// MXNet's error without the stack that it appends.
std::string ErrorText() {
  const std::string text = Mxnet().GetLastError();
  return text.substr(0, text.find("\nStack trace"));
}

}  // namespace

std::shared_ptr<void> AllocateFromMxnet(const Device& device, MemoryKind kind, size_t bytes) {
  const int64_t elements = static_cast<int64_t>((bytes + sizeof(double) - 1) / sizeof(double));
  const int device_type = kind == MemoryKind::kPinned ? kPinnedCpu : kGpu;
  const auto check = [&](int status) {
    if (status == 0) return;
    throw DeviceError(
        Concat("MXNet cannot allocate ", bytes, " bytes for ", device.Name(), ": ", ErrorText()));
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
// Waits for MXNet before a process forks. DataLoader forks its workers, and subprocess forks before
// Python 3.10.
//
// MXNet's own fork handler (initialize.cc, atfork_prepare) first joins the threads of custom
// operators, and then stops the engine. An operator that becomes ready in between has no thread to
// run on, and the process hangs or aborts. Handlers run in the reverse order of registration, so
// this handler runs first, and MXNet is idle afterwards.
//
// os.fork() calls handlers while it holds the GIL, so no thread can queue the work that an operator
// waits for. So Python first calls WaitBeforeFork without the GIL, and the handler remains for
// forks that Python does not see.

void WaitBeforeFork() {
  // WaitAll clears pending array errors, so later reads do not raise them. A failed layer keeps its
  // own error, and its next step raises it; errors of other operators are only printed.
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
