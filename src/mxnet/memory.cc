// A GPU's memory is taken from MXNet, for two reasons. CUDA's calls that allocate and free wait for
// the device's work and hold locks meanwhile; between the launches of an NCCL reduction on two GPUs
// that is a deadlock, so MXNet takes its storage mutex (Storage::GetMutex) around its own and
// around NCCL's launches, and other code cannot take it. And MXNet's pool keeps what its arrays
// have freed: another allocator finds the GPU full, while MXNet, which frees its pool when a
// request does not fit, would have found room.
//
// On the thread of a custom operator this happens (1.9.1: c_api.cc, ndarray.cc, threaded_engine.cc,
// pooled_storage_manager.h, pinned_memory_storage.h):
// * MXNDArrayCreateEx64 with delay_alloc=0 allocates at once, under the storage mutex, and waits
//   for nothing of the engine's. Where the pool has nothing that fits it makes the GPU current, and
//   then the one that it took for the current one. Context 3, pinned memory, has no pool: it is
//   cudaHostAlloc, under the same mutex. All GPUs reach such memory under its own address, whatever
//   the flags are.
// * MXNDArrayFree deletes the array's variable. No operator has ever used that, so the engine does
//   it in the calling thread (FnProperty::kDeleteVar): device memory goes to the pool without any
//   call of CUDA's but cudaSetDevice, pinned memory to cudaFreeHost under the mutex. With the
//   engine gone, at exit, nothing happens.
// * The pool hands out what an array has freed. Whatever MXNet queued for that array is done
//   by then, because its operators wait for their stream; so must have been what we queued.
#include "mxnet/memory.h"

#include <string>

#include "core/error.h"
#include "mxnet/mxnet_api.h"

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
