// The operator's memory from MXNet, and the wait before a fork.
#include <pthread.h>

#include <cstdio>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/program.h"
#include "mxnet/mxnet_api.h"

namespace syncbn {

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
