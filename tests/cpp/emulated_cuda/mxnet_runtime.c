/* CUDA's runtime as mxnet-cu112 needs it to have GPU contexts on a machine without a GPU: device
   memory is the host's, everything is done when a call returns. Kernels of MXNet's own do nothing,
   and device memory starts as NaN, so what needs them gives NaN.
   Who uses it: scripts/check_gpu_wheel.py, with stubs for all other functions. */
#include <stdlib.h>
#include <string.h>

enum { kDevices = 2, kMajor = 75, kMultiprocessors = 16 };
static const size_t kMemory = (size_t)1 << 34;

static _Thread_local int current;

int cudaDriverGetVersion(int* version) { return *version = 11020, 0; }
int cudaGetDeviceCount(int* count) { return *count = kDevices, 0; }
int cudaGetDevice(int* device) { return *device = current, 0; }
int cudaSetDevice(int device) { return current = device, 0; }
/* Names, sizes and limits: all 0. MXNet looks at none of them for what is run here. */
int cudaGetDeviceProperties(void* properties, int device) {
  return (void)device, memset(properties, 0, 512), 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == kMajor ? 8 : attribute == kMultiprocessors ? 3 : 0;
  return 0;
}

static int allocate(void** memory, size_t bytes) {
  *memory = malloc(bytes);
  return memset(*memory, 0xff, bytes), 0;
}
int cudaMalloc(void** memory, size_t bytes) { return allocate(memory, bytes); }
int cudaMallocPitch(void** memory, size_t* pitch, size_t width, size_t height) {
  return *pitch = width, allocate(memory, width * height);
}
int cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return (void)flags, allocate(memory, bytes);
}
int cudaFree(void* memory) { return free(memory), 0; }
int cudaFreeHost(void* memory) { return free(memory), 0; }
int cudaMemGetInfo(size_t* unused, size_t* total) { return *unused = *total = kMemory, 0; }

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return (void)kind, memmove(to, from, bytes), 0;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return (void)stream, cudaMemcpy(to, from, bytes, kind);
}
int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                        void* stream) {
  return (void)to_device, (void)from_device, (void)stream, cudaMemcpy(to, from, bytes, 0);
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  (void)kind, (void)stream;
  for (size_t row = 0; row < height; ++row)
    memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return 0;
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  return (void)stream, memset(memory, value, bytes), 0;
}

int cudaStreamCreate(void** stream) { return allocate(stream, 1); }
int cudaStreamDestroy(void* stream) { return free(stream), 0; }
int cudaEventCreateWithFlags(void** event, unsigned flags) {
  return (void)flags, allocate(event, 1);
}
int cudaEventDestroy(void* event) { return free(event), 0; }
