// Emulates the part of CUDA that kernels and backend need to run as C++ on a CPU: thread indices,
// barriers, shared memory, and a runtime whose device memory is host memory. It models neither
// speed nor memory ordering.
//
// The threads of a block are fibers of the calling thread (fibers.cc) and run until they wait.
// Blocks run one after the other, so `__shared__` is a static variable of the calling thread.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#define EMULATED_CUDA
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
  unsigned x, y, z, w;
};

extern thread_local dim3 threadIdx, blockIdx;

void __syncthreads();
int __syncthreads_or(int any);
inline void __threadfence() {}

namespace emulated {

// Runs `thread` for every thread of every block.
void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread);

}  // namespace emulated

// ---- the runtime -------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyDefault };
enum {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaStreamNonBlocking,
  cudaHostAllocMapped
};
struct cudaDeviceProp {
  char name[256];
};
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUstream_st* cudaStream_t;

namespace emulated {

constexpr int kMultiprocessors = 3;
inline std::atomic<int> allocations{0};  // device and pinned memory
// The number of calls of this thread before one fails; a negative number means that none fails.
inline thread_local int calls_left = -1;

inline cudaError_t Call() {
  if (calls_left < 0) return cudaSuccess;
  return calls_left-- == 0 ? cudaErrorMemoryAllocation : cudaSuccess;
}

inline thread_local int device = -1;            // the thread's current device, or -1
inline std::atomic<int> launches{0}, waits{0};  // kernels, and waits for streams

inline cudaStream_t StreamOf(int device) {
  return reinterpret_cast<cudaStream_t>(static_cast<intptr_t>(device + 1));
}

// Aborts unless the stream is null or a stream of the thread's current device.
inline void CheckStream(cudaStream_t stream) {
  if (stream == nullptr || stream == StreamOf(device)) return;
  std::fprintf(stderr, "emulated launch: the stream is not one of device %d\n", device);
  std::abort();
}

// The memory is initially NaN.
inline cudaError_t Allocate(void** memory, size_t bytes) {
  if (const cudaError_t status = Call()) return status;
  ++allocations;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

}  // namespace emulated

inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMemoryAllocation"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = emulated::Call();
  if (status == cudaSuccess) emulated::device = device;
  return status;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulated::device;
  return emulated::Call();
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "an emulated GPU");
  return emulated::Call();
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = emulated::kMultiprocessors;
  return emulated::Call();
}

inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return emulated::Allocate(memory, bytes);
}
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return emulated::Allocate(memory, bytes);
}
inline cudaError_t cudaMallocManaged(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return emulated::Call();
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return emulated::Call();
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return emulated::Call();
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = emulated::StreamOf(emulated::device);
  return emulated::Call();
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ++emulated::waits;
  return emulated::Call();
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return emulated::Call();
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return emulated::Call(); }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return emulated::Call(); }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return emulated::Call();
}

// ---- what kernels call -------------------------------------------------------------------------

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address += value;
  return old;
}

template <typename T>
T __ldcg(const T* address) {
  return *address;
}
