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
//   not wait for the engine. If nothing in the pool fits, it makes the GPU current, and afterwards
//   the GPU that it took for the current one. Context 3, pinned memory, has no pool: it is
//   cudaHostAlloc, under the same mutex. All GPUs reach such memory under its own address, whatever
//   the flags are.
// * MXNDArrayFree deletes the array's variable. No operator has ever used the variable, so the
//   engine deletes it in the calling thread (FnProperty::kDeleteVar): device memory goes to the
//   pool without any call of CUDA except cudaSetDevice, pinned memory to cudaFreeHost under the
//   mutex. At exit, after the engine has ended, nothing happens.
// * The pool returns memory that an array has freed. All work that MXNet queued for that array is
//   done by then, because its operators wait for their stream; our queued work must be done as
//   well.
#include <string>

#include "core/error.h"
#include "mxnet/engine.h"

namespace syncbn {
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
  NDArrayHandle array = nullptr;
  void* data = nullptr;
  if (Mxnet().NDArrayCreateEx64(&elements, 1, kind == MemoryKind::kPinned ? kPinnedCpu : kGpu,
                                device.id, 0, kFloat64, &array) != 0) {
    throw DeviceError(Concat("MXNet has no ", bytes, " bytes: ", ErrorText()));
  }
  const bool has_data = Mxnet().NDArrayGetData(array, &data) == 0;
  std::shared_ptr<void> memory(data, [array](void*) { Mxnet().NDArrayFree(array); });
  if (!has_data) throw DeviceError(Concat("MXNet has no ", bytes, " bytes: ", ErrorText()));
  return memory;
}

}  // namespace syncbn
