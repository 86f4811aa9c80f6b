/* A libcudart that calls CUDA's driver. scripts/check_gpu_wheel.py runs MXNet's wheel for GPUs with
   it. MXNet's kernels are not launched, so it works on GPUs for which the wheel has no kernels, and
   on GPUs that driver.c emulates. New device memory contains NaN, which remains where MXNet's
   kernels would have written. */
#include <stdlib.h>
#include <string.h>

/* From cuda.h, but an address in device memory is a pointer here. */
int cuInit(unsigned flags);
int cuDriverGetVersion(int* version);
int cuGetErrorString(int status, const char** text);
int cuDeviceGetCount(int* count);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuCtxGetDevice(int* device);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(void** memory, size_t bytes);
int cuMemFree_v2(void* memory);
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags);
int cuMemFreeHost(void* memory);
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total);
int cuMemcpy(void* to, const void* from, size_t bytes);
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream);
int cuMemsetD8_v2(void* memory, unsigned char value, size_t bytes);
int cuMemsetD8Async(void* memory, unsigned char value, size_t bytes, void* stream);
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamDestroy_v2(void* stream);
int cuStreamSynchronize(void* stream);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy_v2(void* event);
int cuEventRecord(void* event, void* stream);

int cudaDriverGetVersion(int* version) { return cuDriverGetVersion(version); }
int cudaGetDeviceCount(int* count) { return cuInit(0) ?: cuDeviceGetCount(count); }

/* MXNet and gluon_syncbn, which has a CUDA runtime of its own, share the primary context. */
int cudaSetDevice(int device) {
  void* context;
  return cuInit(0) ?: cuDevicePrimaryCtxRetain(&context, device) ?: cuCtxSetCurrent(context);
}
/* A thread without a context gets the first device's context. */
static int Enter(void) {
  void* context = NULL;
  const int status = cuInit(0) ?: cuCtxGetCurrent(&context);
  return status != 0 || context != NULL ? status : cudaSetDevice(0);
}
int cudaGetDevice(int* device) { return Enter() ?: cuCtxGetDevice(device); }
int cudaDeviceSynchronize(void) { return Enter() ?: cuCtxSynchronize(); }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return cuInit(0) ?: cuDeviceGetAttribute(value, attribute, device);
}
/* MXNet does not read the properties in the script's tests. */
int cudaGetDeviceProperties(void* properties, int device) {
  memset(properties, 0, 512);
  return 0;
}
/* MXNet must treat the memories of GPUs as separate. */
int cudaDeviceCanAccessPeer(int* can, int device, int peer) { return *can = 0; }

/* Waits for the NaNs, because gluon_syncbn's streams do not wait for the default stream. */
int cudaMalloc(void** memory, size_t bytes) {
  return Enter() ?: cuMemAlloc_v2(memory, bytes) ?: cuMemsetD8_v2(*memory, 0xff, bytes)
      ?: cuCtxSynchronize();
}
int cudaFree(void* memory) { return Enter() ?: cuMemFree_v2(memory); }
int cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return Enter() ?: cuMemHostAlloc(memory, bytes, flags);
}
int cudaFreeHost(void* memory) { return Enter() ?: cuMemFreeHost(memory); }
int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  return Enter() ?: cuMemGetInfo_v2(free_bytes, total);
}

/* An address identifies memory, so `kind`, `to_device` and `from_device` are not needed. */
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return Enter() ?: cuMemcpy(to, from, bytes);
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return Enter() ?: cuMemcpyAsync(to, from, bytes, stream);
}
int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                        void* stream) {
  return Enter() ?: cuMemcpyAsync(to, from, bytes, stream);
}
int cudaMemcpy2DAsync(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  int status = Enter();
  for (size_t row = 0; row < height && status == 0; ++row) {
    status = cuMemcpyAsync(to + row * to_pitch, from + row * from_pitch, width, stream);
  }
  return status;
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  return Enter() ?: cuMemsetD8Async(memory, value, bytes, stream);
}

int cudaStreamCreate(void** stream) { return Enter() ?: cuStreamCreate(stream, 0); }
int cudaStreamDestroy(void* stream) { return Enter() ?: cuStreamDestroy_v2(stream); }
int cudaStreamSynchronize(void* stream) { return Enter() ?: cuStreamSynchronize(stream); }
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return Enter() ?: cuStreamWaitEvent(stream, event, flags);
}
int cudaEventCreateWithFlags(void** event, unsigned flags) {
  return Enter() ?: cuEventCreate(event, flags);
}
int cudaEventDestroy(void* event) { return Enter() ?: cuEventDestroy_v2(event); }
int cudaEventRecord(void* event, void* stream) { return Enter() ?: cuEventRecord(event, stream); }

int __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(void) { return 0; }
int cudaLaunchKernel(void) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
const char* cudaGetErrorString(int status) {
  const char* text = "unknown error";
  cuGetErrorString(status, &text);
  return text;
}
