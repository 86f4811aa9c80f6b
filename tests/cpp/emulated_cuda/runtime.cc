// The runtime of emulated GPUs, whose memory is the host's and initially NaN.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "cuda_runtime.h"

extern "C" int* emulated_device();  // driver.c

namespace {

constexpr int kDevices = 4;
thread_local int calls_left = -1;
std::atomic<int> allocations{0};

cudaStream_t StreamOf(int device) {
  return reinterpret_cast<cudaStream_t>(static_cast<intptr_t>(device + 1));
}

cudaError_t Allocate(void** memory, size_t bytes) {
  if (const cudaError_t status = emulated::Call()) return status;
  ++allocations;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

}  // namespace

namespace emulated {

cudaError_t Call() {
  if (calls_left < 0) return cudaSuccess;
  return calls_left-- == 0 ? cudaErrorMemoryAllocation : cudaSuccess;
}
void FailAfter(int calls) { calls_left = calls; }
int& Device() { return *emulated_device(); }
void CheckStream(cudaStream_t stream) {
  if (stream == nullptr || stream == StreamOf(Device())) return;
  std::fprintf(stderr, "emulated launch: the stream is not one of device %d\n", Device());
  std::abort();
}
int Allocations() { return allocations; }

}  // namespace emulated

const char* cudaGetErrorString(cudaError_t /*status*/) { return "out of memory"; }
const char* cudaGetErrorName(cudaError_t /*status*/) { return "cudaErrorMemoryAllocation"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = emulated::Call();
  if (status == cudaSuccess) emulated::Device() = device;
  return status;
}
cudaError_t cudaGetDevice(int* device) {
  *device = emulated::Device();
  return emulated::Call();
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  std::strcpy(properties->name, "an emulated GPU");
  return emulated::Call();
}
cudaError_t cudaDeviceGetAttribute(int* value, int /*attribute*/, int /*device*/) {
  *value = emulated::kMultiprocessors;
  return emulated::Call();
}

cudaError_t cudaMalloc(void** memory, size_t bytes) { return Allocate(memory, bytes); }
cudaError_t cudaMallocManaged(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return emulated::Call();
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned /*flags*/) {
  return Allocate(memory, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/) {
  std::memcpy(to, from, bytes);
  return emulated::Call();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t /*stream*/) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t /*stream*/) {
  std::memset(memory, value, bytes);
  return emulated::Call();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = StreamOf(emulated::Device());
  return emulated::Call();
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return emulated::Call(); }

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return emulated::Call();
}
cudaError_t cudaEventRecord(cudaEvent_t /*event*/, cudaStream_t /*stream*/) {
  return emulated::Call();
}
cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) { return emulated::Call(); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t /*begin*/, cudaEvent_t /*end*/) {
  *milliseconds = 1;
  return emulated::Call();
}
