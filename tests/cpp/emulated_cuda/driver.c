/* Emulates CUDA's driver, libcuda.so.1, for backend_cuda.cc and mxnet_runtime.c. Device memory is
   host memory, and a call returns when its work is done. The context of a device is its number plus
   one. Calls on memory, streams and events return kNoContext if the thread has no context. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

static __thread int current = -1;
enum { kSuccess, kNoContext = 201 };
enum { kMajorId = 75, kMultiprocessorsId = 16 };  // attributes
static const size_t kMemory = (size_t)1 << 34;

static int Check(void) { return current < 0 ? kNoContext : kSuccess; }
static int Give(int value, int* to) {
  *to = value;
  return kSuccess;
}

int cuCtxGetCurrent(void** context) {
  *context = (void*)(intptr_t)(current + 1);
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = (int)(intptr_t)context - 1;
  return 0;
}
int* emulated_device(void) { return &current; }

int cuInit(unsigned flags) { return kSuccess; }
int cuDriverGetVersion(int* version) { return Give(11020, version); }
int cuDeviceGetCount(int* count) { return Give(2, count); }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return Give(attribute == kMajorId ? 8 : attribute == kMultiprocessorsId ? 3 : 0, value);
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(intptr_t)(device + 1);
  return kSuccess;
}
int cuCtxGetDevice(int* device) { return Check() ?: Give(current, device); }
int cuCtxSynchronize(void) { return Check(); }

static int Allocate(void** memory, size_t bytes) {
  *memory = malloc(bytes);
  return Check();
}
static int Free(void* memory) {
  free(memory);
  return Check();
}
int cuMemAlloc_v2(void** memory, size_t bytes) { return Allocate(memory, bytes); }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) { return Allocate(memory, bytes); }
int cuMemFree_v2(void* memory) { return Free(memory); }
int cuMemFreeHost(void* memory) { return Free(memory); }
int cuMemGetInfo_v2(size_t* available, size_t* total) {
  *available = *total = kMemory;
  return Check();
}
int cuMemcpy(void* to, const void* from, size_t bytes) {
  memmove(to, from, bytes);
  return Check();
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  return cuMemcpy(to, from, bytes);
}
int cuMemsetD8_v2(void* memory, unsigned char value, size_t bytes) {
  memset(memory, value, bytes);
  return Check();
}
int cuMemsetD8Async(void* memory, unsigned char value, size_t bytes, void* stream) {
  return cuMemsetD8_v2(memory, value, bytes);
}

int cuStreamCreate(void** stream, unsigned flags) { return Allocate(stream, 1); }
int cuStreamDestroy_v2(void* stream) { return Free(stream); }
int cuStreamSynchronize(void* stream) { return Check(); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return Check(); }
int cuEventCreate(void** event, unsigned flags) { return Allocate(event, 1); }
int cuEventDestroy_v2(void* event) { return Free(event); }
int cuEventRecord(void* event, void* stream) { return Check(); }

#ifdef __cplusplus
}
#endif
