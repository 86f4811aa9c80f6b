/* Emulates as much of CUDA's runtime as mxnet-cu112 needs for GPU contexts on a machine without a
   GPU: device memory is the host's, and a call returns when all is done. MXNet's own kernels do
   nothing, and device memory starts as NaN, so their results are NaN.
   Who uses it: scripts/check_gpu_wheel.py, with stubs for all other functions. */
#include <stdlib.h>
#include <string.h>

enum { kSuccess, kDevices = 2, kMajor = 75, kMultiprocessors = 16 };
static const size_t kMemory = (size_t)1 << 34;

static _Thread_local int current;

static int Give(int value, int* to) {
  *to = value;
  return kSuccess;
}

int cudaDriverGetVersion(int* version) { return Give(11020, version); }
int cudaGetDeviceCount(int* count) { return Give(kDevices, count); }
int cudaGetDevice(int* device) { return Give(current, device); }
int cudaSetDevice(int device) { return Give(device, &current); }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return Give(attribute == kMajor ? 8 : attribute == kMultiprocessors ? 3 : 0, value);
}
/* Names, sizes and limits: all 0. MXNet looks at none of them for what is run here. */
int cudaGetDeviceProperties(void* properties, int device) {
  memset(properties, 0, 512);
  return kSuccess;
}

static int Allocate(void** memory, size_t bytes) {
  *memory = malloc(bytes);
  memset(*memory, 0xff, bytes);
  return kSuccess;
}
static int Free(void* memory) {
  free(memory);
  return kSuccess;
}

int cudaMalloc(void** memory, size_t bytes) { return Allocate(memory, bytes); }
int cudaMallocPitch(void** memory, size_t* pitch, size_t width, size_t height) {
  *pitch = width;
  return Allocate(memory, width * height);
}
int cudaHostAlloc(void** memory, size_t bytes, unsigned flags) { return Allocate(memory, bytes); }
int cudaFree(void* memory) { return Free(memory); }
int cudaFreeHost(void* memory) { return Free(memory); }
int cudaMemGetInfo(size_t* unused, size_t* total) {
  *unused = *total = kMemory;
  return kSuccess;
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  memmove(to, from, bytes);
  return kSuccess;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return cudaMemcpy(to, from, bytes, kind);
}
int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                        void* stream) {
  return cudaMemcpy(to, from, bytes, 0);
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  for (size_t row = 0; row < height; ++row) {
    memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  }
  return kSuccess;
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  memset(memory, value, bytes);
  return kSuccess;
}

int cudaStreamCreate(void** stream) { return Allocate(stream, 1); }
int cudaStreamDestroy(void* stream) { return Free(stream); }
int cudaEventCreateWithFlags(void** event, unsigned flags) { return Allocate(event, 1); }
int cudaEventDestroy(void* event) { return Free(event); }
